-- KEYS: lists of runs by status. ARGV: prefix, offset. Gives whether there is more at the next
-- offset, how many places on that is, and the number of lines that begin with the prefix for each.
local WINDOW = 1000
local prefix, offset = ARGV[1], tonumber(ARGV[2])
local more = 0
local counts = {}
for number, key in ipairs(KEYS) do
    if prefix == '' then
        counts[number] = redis.call('ZCARD', key)
    else
        local lines = redis.call('ZRANGE', key, offset, offset + WINDOW - 1)
        counts[number] = 0
        for _, line in ipairs(lines) do
            if string.sub(line, 1, #prefix) == prefix then
                counts[number] = counts[number] + 1
            end
        end
        more = #lines == WINDOW and 1 or more
    end
end
return {more, WINDOW, counts}
