-- Leases runs that are due, earliest first.
-- KEYS: the `wakes` keys of shards. ARGV: limit, prefix, time and id to continue after or "", queues
-- and supported workflows as JSON, owner, ttl. Returns where the search stopped, or nil if it reached
-- the end, and the grants as one string, each with the run's wake time.
local prefix = ARGV[2]

local function visit(source, id, at)
    return has_prefix(id, prefix) and {source.shard, id, integer(at)}
end

local runs, stop = visit_due(
    cjson.decode(ARGV[5]), now_text, ARGV[3], ARGV[4], tonumber(ARGV[1]), visit
)
for _, run in ipairs(runs) do
    local shard, id, at = unpack(run)
    local header = read_header(shard .. 'run:' .. id)
    grant(shard, id, header, ARGV[6], ARGV[7], true, at)
end
return {stop, table.concat(grants)}
