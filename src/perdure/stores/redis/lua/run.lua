-- What a run is and how it is found. Goes before the other scripts, which are chunks of one text.
--
-- A run is a hash under <namespace>:{<shard>}:run:<id>, with its header, its snapshot and its
-- journal, one field per entry. All else that belongs to it or finds it carries the same hash tag.
-- It lies in the same slot, so a name that is derived here is as good as a declared one:
--   mail:<id>      hash    events that were not taken, "<number> <name>" -> payload
--   seen:<id>      set     dedup ids of events
--   list:<status>  zset    ids by the time of the last rest, with "\0<workflow>" where there is one
--   wake:<lane>    zset    ids by wake time; the lane of a workflow is "=<name>", of none ""
--   lanes          set     the lanes that hold a run
--   tick           string  the last number that was given

local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]

-- tostring() rounds what has more than 14 digits.
local function text(number)
    return string.format('%.0f', number)
end

local moment = text(now)

local function shard_and_id(run)
    return string.match(run, '^([^{]*{[^}]*}:)run:(.*)$')
end

-- Grows whatever happens: the clock may be set back, and a deleted run's numbers stay used.
local ticks = {}
local function tick(shard)
    local last = ticks[shard] or tonumber(redis.call('GET', shard .. 'tick')) or 0
    ticks[shard] = math.max(last + 1, now)
    local next = text(ticks[shard])
    redis.call('SET', shard .. 'tick', next)
    return next
end

local hinted = false
local function hint(shard)
    if not hinted then
        hinted = true
        -- A user who may not publish loses the hint and nothing else.
        redis.pcall('PUBLISH', string.match(shard, '^[^{]*') .. 'hints', '')
    end
end

-- Arguments cannot be nil: a workflow comes as "=<name>", and as "" when there is none.
local function workflow_of(argument)
    return argument ~= '' and string.sub(argument, 2) or nil
end

local function enlist(shard, id, workflow, status, updated)
    local line = workflow and id .. '\0' .. workflow or id
    redis.call('ZADD', shard .. 'list:' .. status, updated, line)
end

local function delist(shard, id, workflow, status)
    local line = workflow and id .. '\0' .. workflow or id
    redis.call('ZREM', shard .. 'list:' .. status, line)
end

local function wake(shard, id, workflow, at)
    local lane = workflow and '=' .. workflow or ''
    local key = shard .. 'wake:' .. lane
    if at then
        redis.call('ZADD', key, at, id)
        redis.call('SADD', shard .. 'lanes', lane)
    elseif redis.call('ZREM', key, id) == 1 and redis.call('EXISTS', key) == 0 then
        redis.call('SREM', shard .. 'lanes', lane)
    end
end

-- While a slot of a cluster moves to another node, some of its keys are here and some there, and a
-- script is broken off where one is missing. To look at all of a run's keys before the first write
-- makes that harmless: the server refuses to look, and nothing is half done.
local function look(shard, id, workflow)
    redis.call(
        'EXISTS',
        shard .. 'run:' .. id,
        shard .. 'mail:' .. id,
        shard .. 'seen:' .. id,
        shard .. 'tick',
        shard .. 'lanes',
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

-- Adds a field that has a value.
local function add(fields, name, value)
    if value then
        fields[#fields + 1] = name
        fields[#fields + 1] = value
    end
end

-- Makes a run that wakes at a time, or whose owner's lease ends then; gives its epoch.
local function create(shard, id, workflow, snapshot, at, owner)
    look(shard, id, workflow)
    local epoch = tick(shard)
    local fields = {
        'status', 'running', 'updated', moment, 'epoch', epoch, 'wake', at, 'snapshot', snapshot
    }
    add(fields, 'workflow', workflow)
    add(fields, 'owner', owner)
    redis.call('HSET', shard .. 'run:' .. id, unpack(fields))
    enlist(shard, id, workflow, 'running', moment)
    wake(shard, id, workflow, at)
    return epoch
end

local function lies_in_inbox(shard, id, names)
    local wanted = {}
    for _, name in ipairs(names) do
        wanted[name] = true
    end
    for _, message in ipairs(redis.call('HKEYS', shard .. 'mail:' .. id)) do
        if wanted[string.match(message, '^%d+ (.*)$')] then
            return true
        end
    end
    return false
end

-- Puts a run to rest. What it was before is gone, but for its inbox. `folded` is the place of the
-- entry that does it, if there is one.
local function lay(shard, id, workflow, epoch, folded, snapshot, rest)
    local run = shard .. 'run:' .. id
    local was = redis.call('HMGET', run, 'status', 'workflow')
    local at = rest.wake and text(rest.wake)
    look(shard, id, workflow)
    if was[2] ~= (workflow or false) then
        look(shard, id, was[2] or nil)
    end
    if rest.awaits and lies_in_inbox(shard, id, rest.awaits) then
        at = moment
    end
    if was[1] then
        delist(shard, id, was[2] or nil, was[1])
        if not at or was[2] ~= (workflow or false) then
            wake(shard, id, was[2] or nil, nil)
        end
        redis.call('UNLINK', run)
    end
    local fields = {
        'status', rest.status, 'updated', moment, 'epoch', epoch, 'snapshot', snapshot
    }
    add(fields, 'workflow', workflow)
    add(fields, 'folded', folded)
    add(fields, 'wake', at)
    add(fields, 'awaits', rest.awaits and cjson.encode(rest.awaits))
    redis.call('HSET', run, unpack(fields))
    enlist(shard, id, workflow, rest.status, moment)
    if at then
        wake(shard, id, workflow, at)
        if tonumber(at) <= now then
            hint(shard)
        end
    end
end

local function remove(shard, id)
    local run = shard .. 'run:' .. id
    local was = redis.call('HMGET', run, 'status', 'workflow')
    if not was[1] then
        return false
    end
    look(shard, id, was[2] or nil)
    delist(shard, id, was[2] or nil, was[1])
    wake(shard, id, was[2] or nil, nil)
    redis.call('UNLINK', run, shard .. 'mail:' .. id, shard .. 'seen:' .. id)
    return true
end
