-- Counts the due runs of queues, a window of wake sets at a time. Runs and queues whose names begin
-- with "~" are left out.
-- KEYS: the `wakes` key of a shard. ARGV: the wake set after which to begin, or "". Returns the last
-- wake set, or nil if there are no more; and a flat list with three values per queue: its name, the
-- number of due runs and the earliest wake time.
local WINDOW = 1000
local shard = shard_of(KEYS[1])
local from = ARGV[1] ~= '' and '(' .. ARGV[1] or '-'
local sets = redis.call('ZRANGEBYLEX', KEYS[1], from, '+', 'LIMIT', 0, WINDOW)
local rows = {}
for _, set in ipairs(sets) do
    local key = shard .. 'wake:' .. set
    local first = redis.call('ZRANGEBYSCORE', key, '-inf', now_text, 'WITHSCORES', 'LIMIT', 0, 1)
    local is_system = string.byte(set) == 126 or string.byte(set, -1) == 126
    if first[2] and not is_system then
        rows[#rows + 1] = string.match(set, '^%Z*')
        rows[#rows + 1] = redis.call('ZCOUNT', key, '-inf', now_text)
        rows[#rows + 1] = integer(first[2])
    end
end
return {#sets == WINDOW and sets[WINDOW], rows}
