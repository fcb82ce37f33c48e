-- The keys of a run and the functions that change them. Placed before most scripts: the parts of a
-- script are joined into one text.
--
-- A run is a hash under <namespace>:{<shard>}:run:<id>, with its header, its snapshot and its
-- journal, one field per entry. Everything else that belongs to it or finds it has the same hash
-- tag and so is in the same slot, which allows a script to use keys whose names it derives:
--   inbox:<id>       hash    messages that were not consumed, "<number> <name>" -> payload
--   dedup:<id>       set     dedup ids of messages
--   list:<status>    zset    ids by the time of the last rest, with "\0<workflow>" if there is one
--   wake:<workflow>  zset    ids by wake time; the workflow is "=<name>", or "" for none
--   workflows        set     the workflows that have a wake set, in the same form
--   sequence         string  the last number that was given to an epoch or a message
--
-- The server executes a script atomically, but does not roll back one that fails. So each script
-- makes every check that can fail before its first write.

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

-- tostring() rounds a number of more than 14 digits.
local function integer(number)
    return string.format('%.0f', number)
end

local now_text = integer(now)

local function shard_and_id(run)
    return string.match(run, '^([^{]*{[^}]*}:)run:(.*)$')
end

-- Returns a number that the shard never gave before, even if the clock was set back or the run
-- that had the last number was deleted.
local sequences = {}
local function next_number(shard)
    local last = sequences[shard] or tonumber(redis.call('GET', shard .. 'sequence')) or 0
    sequences[shard] = math.max(last + 1, now)
    local number = integer(sequences[shard])
    redis.call('SET', shard .. 'sequence', number)
    return number
end

local is_notified = false
local function notify(shard)
    if not is_notified then
        is_notified = true
        -- Without the permission to publish only the notification is lost.
        redis.pcall('PUBLISH', string.match(shard, '^[^{]*') .. 'notifications', '')
    end
end

-- An argument cannot be nil: a workflow is passed as "=<name>", and none as "".
local function workflow_of(argument)
    return argument ~= '' and string.sub(argument, 2) or nil
end

local function list_member(id, workflow)
    return workflow and id .. '\0' .. workflow or id
end

local function add_to_list(shard, id, workflow, status, updated)
    redis.call('ZADD', shard .. 'list:' .. status, updated, list_member(id, workflow))
end

local function remove_from_list(shard, id, workflow, status)
    redis.call('ZREM', shard .. 'list:' .. status, list_member(id, workflow))
end

-- Sets the wake time of a run, or removes it if `at` is nil.
local function schedule(shard, id, workflow, at)
    local member = workflow and '=' .. workflow or ''
    local key = shard .. 'wake:' .. member
    if at then
        redis.call('ZADD', key, at, id)
        redis.call('SADD', shard .. 'workflows', member)
    elseif redis.call('ZREM', key, id) == 1 and redis.call('EXISTS', key) == 0 then
        redis.call('SREM', shard .. 'workflows', member)
    end
end

-- Fails unless all keys of a run are on this node. While a slot of a cluster moves to another node,
-- some of its keys are here and some there, and a script is aborted at the first key that is
-- missing. Naming all keys before the first write means that nothing is left half done.
local function require_keys(shard, id, workflow)
    redis.call(
        'EXISTS',
        shard .. 'run:' .. id,
        shard .. 'inbox:' .. id,
        shard .. 'dedup:' .. id,
        shard .. 'sequence',
        shard .. 'workflows',
        shard .. 'wake:' .. (workflow and '=' .. workflow or ''),
        shard .. 'list:running',
        shard .. 'list:suspended',
        shard .. 'list:waiting',
        shard .. 'list:paused',
        shard .. 'list:completed',
        shard .. 'list:failed',
        shard .. 'list:cancelled'
    )
end

-- Adds a field if it has a value.
local function add_field(fields, name, value)
    if value then
        fields[#fields + 1] = name
        fields[#fields + 1] = value
    end
end

-- Creates a run and returns its epoch. `at` is its wake time, or when its owner's lease ends.
local function create(shard, id, workflow, snapshot, at, owner)
    require_keys(shard, id, workflow)
    local epoch = next_number(shard)
    local fields = {
        'status', 'running', 'updated', now_text, 'epoch', epoch, 'wake', at, 'snapshot', snapshot
    }
    add_field(fields, 'workflow', workflow)
    add_field(fields, 'owner', owner)
    redis.call('HSET', shard .. 'run:' .. id, unpack(fields))
    add_to_list(shard, id, workflow, 'running', now_text)
    schedule(shard, id, workflow, at)
    return epoch
end

-- Returns whether the inbox has a message of one of these names.
local function has_message(shard, id, names)
    local is_awaited = {}
    for _, name in ipairs(names) do
        is_awaited[name] = true
    end
    for _, message in ipairs(redis.call('HKEYS', shard .. 'inbox:' .. id)) do
        if is_awaited[string.match(message, '^%d+ (.*)$')] then
            return true
        end
    end
    return false
end

-- Replaces a run by its state at rest; only its inbox stays. `place` is that of the entry that is
-- the rest, or nil. The inbox is checked in the same script, so a message that a run awaits is
-- either seen here or finds `awaits` when it is sent.
local function settle(shard, id, workflow, epoch, place, snapshot, rest)
    local run = shard .. 'run:' .. id
    local old = redis.call('HMGET', run, 'status', 'workflow')
    local old_status, old_workflow = old[1], old[2] or nil
    local at = rest.wake and integer(rest.wake)
    require_keys(shard, id, workflow)
    if old_workflow ~= workflow then
        require_keys(shard, id, old_workflow)
    end
    if rest.awaits and has_message(shard, id, rest.awaits) then
        at = now_text
    end
    if old_status then
        remove_from_list(shard, id, old_workflow, old_status)
        if not at or old_workflow ~= workflow then
            schedule(shard, id, old_workflow, nil)
        end
        redis.call('UNLINK', run)
    end
    local fields = {
        'status', rest.status, 'updated', now_text, 'epoch', epoch, 'snapshot', snapshot
    }
    add_field(fields, 'workflow', workflow)
    add_field(fields, 'settled', place)
    add_field(fields, 'wake', at)
    add_field(fields, 'awaits', rest.awaits and cjson.encode(rest.awaits))
    redis.call('HSET', run, unpack(fields))
    add_to_list(shard, id, workflow, rest.status, now_text)
    if at then
        schedule(shard, id, workflow, at)
        if tonumber(at) <= now then
            notify(shard)
        end
    end
end

-- Deletes a run and everything that belongs to it; returns whether it existed.
local function delete(shard, id)
    local run = shard .. 'run:' .. id
    local old = redis.call('HMGET', run, 'status', 'workflow')
    if not old[1] then
        return false
    end
    require_keys(shard, id, old[2] or nil)
    remove_from_list(shard, id, old[2] or nil, old[1])
    schedule(shard, id, old[2] or nil, nil)
    redis.call('UNLINK', run, shard .. 'inbox:' .. id, shard .. 'dedup:' .. id)
    return true
end
