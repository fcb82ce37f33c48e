-- Finds runs that are due, earliest first.
-- KEYS: the `wakes` keys of shards. ARGV: limit, prefix, time and id to continue after or "", queues
-- and supported workflows as JSON, and the time or "" for now. Returns where the search stopped, or
-- nil if it reached the end, and "<time>\0<queue>\0<id>" for each run.
local prefix = ARGV[2]

local function visit(source, id, at)
    if not has_prefix(id, prefix) then
        return false
    end
    -- The wake time of an owned run is when its lease expires; until then the run is not due.
    if at > now and redis.call('HEXISTS', source.shard .. 'run:' .. id, 'owner') == 1 then
        return false
    end
    local queue = string.match(source.key, '^%Z*', #source.shard + #'wake:' + 1)
    return integer(at) .. '\0' .. queue .. '\0' .. id
end

local to = ARGV[6] ~= '' and ARGV[6] or now_text
local lines, stop = visit_due(
    cjson.decode(ARGV[5]), to, ARGV[3], ARGV[4], tonumber(ARGV[1]), visit
)
return {stop, lines}
