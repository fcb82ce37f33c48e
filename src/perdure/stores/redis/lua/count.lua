-- Counts runs by status, under a prefix a window of each list at a time.
-- KEYS: lists of runs by status. ARGV: prefix, offset. Returns whether there is more, by how much
-- to raise the offset for it, and a count for each list.
local WINDOW = 1000
local prefix, offset = ARGV[1], tonumber(ARGV[2])
local more = 0
local counts = {}
for number, key in ipairs(KEYS) do
    if prefix == '' then
        counts[number] = redis.call('ZCARD', key)
    else
        local members = redis.call('ZRANGE', key, offset, offset + WINDOW - 1)
        counts[number] = 0
        for _, member in ipairs(members) do
            if string.sub(member, 1, #prefix) == prefix then
                counts[number] = counts[number] + 1
            end
        end
        more = #members == WINDOW and 1 or more
    end
end
return {more, WINDOW, counts}
