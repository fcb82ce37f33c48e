-- Moves runs of the first layout to the second, some at a time.
-- KEYS: the key of the shard's mark. Returns 1 if there may be more, 0 if all were moved.
--
-- In the first layout, keys have no layout number after the hash tag, an inbox is a hash of
-- "<number> <name>" -> payload, and the indexes are:
--   list:<status>    zset  ids by the time of the last rest, with "\0<workflow>" if there is one
--   wake:<workflow>  zset  ids by wake time; the workflow is "=<name>", or "" for none
--   workflows        set   the workflows that have a wake set
-- Each run is in exactly one list, from which it is removed in the script that moves it.
local STATUSES = {'running', 'suspended', 'waiting', 'paused', 'completed', 'failed', 'cancelled'}
local MAX_RUNS = 100
local mark = KEYS[1]
local old = string.match(mark, '^(.*)sequence$')
local shard = old .. '2:'

local function move_inbox(id)
    for _, message in ipairs(redis.call('HKEYS', old .. 'inbox:' .. id)) do
        local number, name = string.match(message, '^(%d+) (.*)$')
        local payload = redis.call('HGET', old .. 'inbox:' .. id, message)
        local member = number .. ' ' .. #name .. ' ' .. name .. payload
        redis.call('ZADD', shard .. 'inbox:' .. id, number, member)
    end
    redis.call('UNLINK', old .. 'inbox:' .. id)
end

local function move(id)
    local header = read_header(old .. 'run:' .. id)
    if not header then
        return
    end
    require_keys(shard, {
        old .. 'inbox:' .. id,
        old .. 'dedup:' .. id,
        shard .. 'run:' .. id,
        shard .. 'inbox:' .. id,
        shard .. 'dedup:' .. id,
        unpack(index_keys(shard, id, {header})),
    })
    redis.call('RENAME', old .. 'run:' .. id, shard .. 'run:' .. id)
    if redis.call('EXISTS', old .. 'dedup:' .. id) == 1 then
        redis.call('RENAME', old .. 'dedup:' .. id, shard .. 'dedup:' .. id)
    end
    move_inbox(id)
    redis.call('ZADD', shard .. 'ids', 0, id)
    add_to_list(shard, id, header)
    if header.wake then
        schedule(shard, id, header, header.wake)
    end
end

local count = 0
for _, status in ipairs(STATUSES) do
    local list = old .. 'list:' .. status
    for _, member in ipairs(redis.call('ZRANGE', list, 0, MAX_RUNS - count - 1)) do
        move(string.match(member, '^%Z+'))
        redis.call('ZREM', list, member)
        count = count + 1
    end
    if count == MAX_RUNS then
        return 1
    end
end
for _, workflow in ipairs(redis.call('SMEMBERS', old .. 'workflows')) do
    redis.call('UNLINK', old .. 'wake:' .. workflow)
end
redis.call('UNLINK', old .. 'workflows')
redis.call('HDEL', mark, 'moving')
return 0
