-- Counts the runs in each list, except for lists of runs whose ids begin with "~".
-- KEYS: the `lists` keys of shards. Returns a flat list of names, each followed by a number of runs.
local counts = {}
for _, key in ipairs(KEYS) do
    for _, list in ipairs(redis.call('SMEMBERS', key)) do
        if string.byte(list) ~= 126 then
            counts[#counts + 1] = list
            counts[#counts + 1] = redis.call('ZCARD', string.sub(key, 1, -2) .. ':' .. list)
        end
    end
end
return counts
