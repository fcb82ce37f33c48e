-- Reads the runs whose ids are in a range, if they are few.
-- KEYS: the `ids` keys of shards. ARGV: start and end of the range, and the maximum number of runs.
-- Returns how many runs there are, and their descriptions, unless there are more than the maximum.
local count = 0
for _, key in ipairs(KEYS) do
    count = count + redis.call('ZLEXCOUNT', key, ARGV[1], ARGV[2])
end
local descriptions = {}
for _, key in ipairs(count <= tonumber(ARGV[3]) and KEYS or {}) do
    for _, id in ipairs(redis.call('ZRANGEBYLEX', key, ARGV[1], ARGV[2])) do
        descriptions[#descriptions + 1] = describe(shard_of(key), id)
    end
end
return {count, descriptions}
