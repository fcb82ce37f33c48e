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

local function shard_and_id(run)
    return string.match(run, '^([^{]*{[^}]*}:)run:(.*)$')
end

-- Grows whatever happens: the clock may be set back, and a deleted run's numbers stay used.
local function tick(shard)
    local last = tonumber(redis.call('GET', shard .. 'tick')) or 0
    local next = text(math.max(last + 1, now))
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
        shard .. 'list:completed',
        shard .. 'list:failed',
        shard .. 'list:cancelled'
    )
end

local function write(key, fields)
    local flat = {}
    for name, value in pairs(fields) do
        flat[#flat + 1] = name
        flat[#flat + 1] = value
    end
    redis.call('HSET', key, unpack(flat))
end

local function create(shard, id, workflow, snapshot)
    look(shard, id, workflow)
    local updated = text(now)
    write(shard .. 'run:' .. id, {
        status = 'running',
        workflow = workflow,
        updated = updated,
        epoch = tick(shard),
        snapshot = snapshot,
    })
    enlist(shard, id, workflow, 'running', updated)
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

-- Puts a run to rest. What it was before is gone, but for its inbox.
local function lay(shard, id, header, snapshot, rest)
    local run = shard .. 'run:' .. id
    local was = redis.call('HMGET', run, 'status', 'workflow')
    local workflow = header.workflow
    local at = rest.wake and text(rest.wake)
    look(shard, id, workflow)
    look(shard, id, was[2] or nil)
    if rest.awaits and lies_in_inbox(shard, id, rest.awaits) then
        at = text(now)
    end
    if was[1] then
        delist(shard, id, was[2] or nil, was[1])
        if not at or was[2] ~= (workflow or false) then
            wake(shard, id, was[2] or nil, nil)
        end
        redis.call('UNLINK', run)
    end
    header.status = rest.status
    header.updated = text(now)
    header.wake = at
    header.awaits = rest.awaits and cjson.encode(rest.awaits)
    header.snapshot = snapshot
    write(run, header)
    enlist(shard, id, workflow, rest.status, header.updated)
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
