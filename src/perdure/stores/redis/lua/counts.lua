-- KEYS: the `lists` keys of shards. Returns the names of their lists and the number of runs in each,
-- in turn, except for lists of runs whose ids begin with "~".
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
