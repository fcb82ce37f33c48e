-- Deletes old runs, examining a window of a list at a time.
-- KEYS: a list of runs that are over. ARGV: age, limit, prefix, offset. Returns how many were
-- deleted, how many of other prefixes were skipped, and whether there is more to examine.
local WINDOW = 500
local limit, prefix = tonumber(ARGV[2]), ARGV[3]
local before = '(' .. integer(now - tonumber(ARGV[1]))
local shard = string.match(KEYS[1], '^([^{]*{[^}]*}:)')
local members = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', before, 'LIMIT', ARGV[4], WINDOW)
local deleted, skipped = 0, 0
for _, member in ipairs(members) do
    if string.sub(member, 1, #prefix) ~= prefix then
        skipped = skipped + 1
    elseif deleted < limit then
        delete(shard, string.match(member, '^%Z+'))
        deleted = deleted + 1
    end
end
return {deleted, skipped, #members == WINDOW and 1 or 0}
