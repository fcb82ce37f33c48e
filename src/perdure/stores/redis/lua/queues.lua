-- Finds the queues of a shard that have due runs, in order of their names, with one seek per queue.
-- KEYS: the `wakes` key of the shard. ARGV: limit, the first name, the name before which to end or
-- "", and the time. Returns the name from which to continue, or nil at the end, and the names.
local MAX_QUEUES = 2000
local limit, to = tonumber(ARGV[1]), ARGV[4]
local shard = shard_of(KEYS[1])
local last = ARGV[3] ~= '' and '(' .. ARGV[3] or '+'

local function has_due(queue)
    for _, set in ipairs(wake_sets(shard, queue)) do
        local key = shard .. 'wake:' .. set
        if redis.call('ZRANGEBYSCORE', key, '-inf', to, 'LIMIT', 0, 1)[1] then
            return true
        end
    end
    return false
end

local names, from = {}, ARGV[2]
for _ = 1, MAX_QUEUES do
    local set = redis.call('ZRANGEBYLEX', KEYS[1], '[' .. from, last, 'LIMIT', 0, 1)[1]
    if not set then
        return {false, names}
    end
    local queue = string.match(set, '^%Z*')
    if has_due(queue) then
        names[#names + 1] = queue
    end
    -- A name contains no NUL, so no name sorts between this one and this one followed by "\1".
    from = queue .. '\1'
    if #names == limit then
        break
    end
end
return {from, names}
