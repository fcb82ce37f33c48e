-- The keys of a run and the functions that change them. Placed before most scripts: the parts of a
-- script are joined into one text.
--
-- A run is a hash under <namespace>:{<tag>}:<layout>:run:<id>, with its header, its snapshot and its
-- journal, one field per entry. All other keys that belong to it or index it have the same hash tag,
-- and so are in the same slot, which allows a script to use keys whose names it derives:
--   inbox:<id>   zset    messages that were not consumed, by number:
--                        "<number> <length of the name> <name><payload>"
--   dedup:<id>   set     dedup ids of messages
--   ids          zset    all ids, by their bytes
--   list:<list>  zset    ids by the time of the last rest, one list per status and workflow
--   lists        set     the lists that have runs
--   tag:<tag>    zset    ids by the time of creation
--   wake:<set>   zset    ids by wake time, one set per queue, workflow and version
--   wakes        zset    the wake sets that have runs, by their bytes
--   sequence     string  the last number that was assigned to an epoch or a message
--
-- A list is "<status>:<workflow>", a wake set "<queue>\0<workflow>\0<version>". In both, a workflow
-- is "=<name>", or "" for none. Runs whose stored ids begin with "~" have lists and wake sets of
-- their own, with a "~" before or after the name, so that the others can be counted by index.
--
-- The server executes a script atomically, but does not roll back one that fails. So each script
-- makes every check that can fail before its first write.

-- The scripts for a cluster have `true` here.
local in_cluster = false

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

-- tostring() rounds a number of more than 14 digits.
local function integer(number)
    return string.format('%.0f', number)
end

local now_text = integer(now)

local function shard_of(key)
    return string.match(key, '^([^{]*{[^}]*}:%d+:)')
end

local function shard_and_id(run)
    return string.match(run, '^([^{]*{[^}]*}:%d+:)run:(.*)$')
end

-- Returns a number that the shard has never assigned before, even if the clock was set back, or the
-- run that had the last number was deleted.
local sequences = {}
local function next_number(shard)
    local last = sequences[shard] or tonumber(redis.call('GET', shard .. 'sequence')) or 0
    sequences[shard] = math.max(last + 1, now)
    local number = integer(sequences[shard])
    redis.call('SET', shard .. 'sequence', number)
    return number
end

-- The runs in a system queue, such as permits, are not executed, so no worker needs to be notified.
local function in_system_queue(header)
    return string.sub(header.queue or '', 1, 1) == '~'
end

-- `sender` is the store whose listeners know already, if there is one.
local is_notified = false
local function notify(shard, sender)
    if not is_notified then
        is_notified = true
        -- Without the permission to publish only the notification is lost.
        redis.pcall('PUBLISH', string.match(shard, '^[^{]*') .. 'notifications', sender or '')
    end
end

-- Decodes an argument: JSON, optionally followed by a NUL and a summary, whose bytes JSON cannot
-- contain. Returns the value, and the summary or nil.
local function decode(argument)
    local zero = string.find(argument, '\0', 1, true)
    if not zero then
        return cjson.decode(argument), nil
    end
    return cjson.decode(string.sub(argument, 1, zero - 1)), string.sub(argument, zero + 1)
end

-- Returns the header of a run, or nil. Its tags are JSON.
local function read_header(run)
    local status, workflow, queue, version, tags, created, updated, owner, epoch, wake, takeovers =
        unpack(redis.call(
            'HMGET', run, 'status', 'workflow', 'queue', 'version', 'tags', 'created', 'updated',
            'owner', 'epoch', 'wake', 'takeovers'
        ))
    return status and {
        status = status,
        workflow = workflow and '=' .. workflow or '',
        queue = queue or '',
        version = version or '0',
        tags = tags or '[]',
        created = created or nil,
        updated = updated,
        owner = owner or nil,
        epoch = epoch,
        wake = wake or nil,
        takeovers = tonumber(takeovers or 0),
    } or nil
end

local function system_mark(id)
    return string.byte(id) == 126 and '~' or ''
end

local function list_of(id, header)
    if not header.list then
        header.list = system_mark(id) .. header.status .. ':' .. header.workflow
    end
    return header.list
end

local function wake_set_of(id, header)
    if not header.set then
        header.set = header.queue .. '\0' .. header.workflow .. '\0' .. header.version
            .. system_mark(id)
    end
    return header.set
end

-- The lists and wake sets to which this script has already added a run, and which are therefore in
-- their index: the runs of a batch often share them.
local indexed_keys = {}

local function add_to_list(shard, id, header)
    local list = list_of(id, header)
    local key = shard .. 'list:' .. list
    redis.call('ZADD', key, header.updated, id)
    if not indexed_keys[key] then
        indexed_keys[key] = true
        redis.call('SADD', shard .. 'lists', list)
    end
end

local function remove_from_list(shard, id, header)
    local list = list_of(id, header)
    local key = shard .. 'list:' .. list
    if redis.call('ZREM', key, id) == 1 and redis.call('EXISTS', key) == 0 then
        indexed_keys[key] = nil
        redis.call('SREM', shard .. 'lists', list)
    end
end

local function schedule(shard, id, header, at)
    local set = wake_set_of(id, header)
    local key = shard .. 'wake:' .. set
    -- A set that already contained the run is already in the index.
    if redis.call('ZADD', key, at, id) == 1 and not indexed_keys[key] then
        indexed_keys[key] = true
        redis.call('ZADD', shard .. 'wakes', 0, set)
    end
end

local function unschedule(shard, id, header)
    local set = wake_set_of(id, header)
    local key = shard .. 'wake:' .. set
    if redis.call('ZREM', key, id) == 1 and redis.call('EXISTS', key) == 0 then
        indexed_keys[key] = nil
        redis.call('ZREM', shard .. 'wakes', set)
    end
end

local function add_tags(shard, id, header)
    if header.tags == '[]' then
        return
    end
    for _, tag in ipairs(cjson.decode(header.tags)) do
        -- A run of the first layout has no time of creation.
        redis.call('ZADD', shard .. 'tag:' .. tag, header.created or header.updated, id)
    end
end

local function remove_tags(shard, id, header)
    if header.tags == '[]' then
        return
    end
    for _, tag in ipairs(cjson.decode(header.tags)) do
        redis.call('ZREM', shard .. 'tag:' .. tag, id)
    end
end

-- On a cluster, fails unless all keys that a script will use for a run are on this node: `keys`, and
-- the indexes of the shard. While a slot moves to another node, some of its keys are on either node,
-- and a script is aborted at the first key that is missing. Reading all keys before the first write
-- ensures that no script is aborted between two writes.
local is_checked = {}
local function require_keys(shard, keys)
    if not in_cluster then
        return
    end
    if not is_checked[shard] then
        redis.call(
            'EXISTS', shard .. 'ids', shard .. 'lists', shard .. 'wakes', shard .. 'sequence'
        )
        is_checked[shard] = true
    end
    redis.call('EXISTS', unpack(keys))
end

-- Returns the keys of the indexes that contain a run with any of these headers.
local function index_keys(shard, id, headers)
    local keys = {}
    for _, header in ipairs(headers) do
        keys[#keys + 1] = shard .. 'list:' .. list_of(id, header)
        keys[#keys + 1] = shard .. 'wake:' .. wake_set_of(id, header)
        if header.tags ~= '[]' then
            for _, tag in ipairs(cjson.decode(header.tags)) do
                keys[#keys + 1] = shard .. 'tag:' .. tag
            end
        end
    end
    return keys
end

-- Adds a field if it has a value that is not the default one.
local function add_field(fields, name, value, default)
    if value and value ~= default then
        fields[#fields + 1] = name
        fields[#fields + 1] = value
    end
end

-- Writes the hash of a run that does not exist, or no longer does, and adds the run to its list and
-- its wake set. `run` is its header, together with its summary, its snapshot and the other fields.
local function write(shard, id, run)
    local fields = {
        'status', run.status, 'updated', run.updated, 'epoch', run.epoch, 'snapshot', run.snapshot
    }
    add_field(fields, 'workflow', run.workflow ~= '' and string.sub(run.workflow, 2))
    add_field(fields, 'queue', run.queue, '')
    add_field(fields, 'version', run.version, '0')
    add_field(fields, 'tags', run.tags, '[]')
    add_field(fields, 'summary', run.summary, '')
    add_field(fields, 'created', run.created)
    add_field(fields, 'wake', run.wake)
    add_field(fields, 'owner', run.owner)
    add_field(fields, 'settled', run.settled)
    add_field(fields, 'awaits', run.awaits and cjson.encode(run.awaits))
    redis.call('HSET', shard .. 'run:' .. id, unpack(fields))
    add_to_list(shard, id, run)
    if run.wake then
        schedule(shard, id, run, run.wake)
    end
end

-- Creates a run and returns its epoch. While a run has an owner, its wake time is the lease's end.
local function create(shard, id, run)
    require_keys(shard, {shard .. 'run:' .. id, unpack(index_keys(shard, id, {run}))})
    run.updated, run.created, run.epoch = now_text, now_text, next_number(shard)
    write(shard, id, run)
    add_tags(shard, id, run)
    redis.call('ZADD', shard .. 'ids', 0, id)
    return run.epoch
end

-- Removes messages from an inbox.
local function consume(shard, id, messages)
    for _, message in ipairs(messages) do
        -- Any other id is not from this store, and the server would reject it as a score.
        if string.find(message, '^%d+$') then
            redis.call('ZREMRANGEBYSCORE', shard .. 'inbox:' .. id, message, message)
        end
    end
end

local function name_of(message)
    local _, last, length = string.find(message, '^%d+ (%d+) ')
    return string.sub(message, last + 1, last + length)
end

-- Returns whether the inbox has a message of one of these names.
local function has_message(shard, id, names)
    local inbox = shard .. 'inbox:' .. id
    local is_awaited = {}
    for _, name in ipairs(names) do
        is_awaited[name] = true
    end
    -- In parts, because payloads may be large.
    for offset = 0, redis.call('ZCARD', inbox) - 1, 100 do
        for _, message in ipairs(redis.call('ZRANGE', inbox, offset, offset + 99)) do
            if is_awaited[name_of(message)] then
                return true
            end
        end
    end
    return false
end

-- Returns the header that a run has after a rest, given the previous one. The run keeps its summary
-- if `summary` is nil.
local function header_at_rest(run, header, rest, summary)
    return {
        status = rest.status,
        workflow = header.workflow,
        queue = header.queue,
        version = rest.version or header.version,
        tags = rest.tags or header.tags,
        summary = summary or redis.call('HGET', run, 'summary') or '',
        created = header.created,
        updated = now_text,
        wake = rest.wake,
        awaits = rest.awaits,
    }
end

-- Replaces a run by its state at rest; only its inbox is kept, without the messages it consumes.
-- `old` is its header, or nil for a new run. The inbox is checked in the same script, so a message
-- that the run awaits is either found here, or finds `awaits` when it is sent.
local function settle(shard, id, old, new, consumes)
    require_keys(shard, {
        shard .. 'run:' .. id,
        shard .. 'inbox:' .. id,
        unpack(index_keys(shard, id, {new, old})),
    })
    consume(shard, id, consumes)
    new.epoch = new.epoch or next_number(shard)
    if new.awaits and has_message(shard, id, new.awaits) then
        new.wake = now_text
    end
    if old then
        remove_from_list(shard, id, old)
        if old.wake and not (new.wake and wake_set_of(id, old) == wake_set_of(id, new)) then
            unschedule(shard, id, old)
        end
        redis.call('UNLINK', shard .. 'run:' .. id)
    else
        redis.call('ZADD', shard .. 'ids', 0, id)
    end
    if old and old.tags ~= new.tags then
        remove_tags(shard, id, old)
    end
    if not (old and old.tags == new.tags and new.created) then
        add_tags(shard, id, new)
    end
    write(shard, id, new)
    if new.wake and tonumber(new.wake) <= now then
        notify(shard)
    end
end

-- Deletes a run and everything that belongs to it; returns whether it existed.
local function delete(shard, id)
    local run = shard .. 'run:' .. id
    local header = read_header(run)
    if not header then
        return false
    end
    require_keys(shard, {
        run,
        shard .. 'inbox:' .. id,
        shard .. 'dedup:' .. id,
        unpack(index_keys(shard, id, {header})),
    })
    remove_from_list(shard, id, header)
    unschedule(shard, id, header)
    remove_tags(shard, id, header)
    redis.call('ZREM', shard .. 'ids', id)
    redis.call('UNLINK', run, shard .. 'inbox:' .. id, shard .. 'dedup:' .. id)
    return true
end
