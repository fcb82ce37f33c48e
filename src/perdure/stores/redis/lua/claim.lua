-- Leases runs that are due, earliest first.
-- KEYS: the `workflows` keys of shards. ARGV: limit, prefix, time and id to continue after or "",
-- workflows as JSON or "", owner, ttl. Returns where it stopped or nil, and the grants, each with
-- the run's wake time.
local prefix = ARGV[2]
local mark = mark_of(ARGV[3], ARGV[4])
local workflows = ARGV[5] ~= '' and cjson.decode(ARGV[5])

local function is_wanted(id)
    return has_prefix(id, prefix)
end

local lines, stopped = due_runs(workflows, now_text, mark, tonumber(ARGV[1]), is_wanted)
local grants = {}
for number, line in ipairs(lines) do
    local shard, id, at = unpack(line)
    local header = read_header(shard .. 'run:' .. id)
    grants[number] = grant(shard, id, header, ARGV[6], ARGV[7], at)
end
return {stopped, grants}
