-- Finds runs that are due, earliest first.
-- KEYS: the `workflows` keys of shards. ARGV: limit, prefix, time and id to continue after or "",
-- workflows as JSON or "", and the time or "" for now. Returns where it stopped or nil, and
-- "<time> <id>" for each run.
local prefix = ARGV[2]
local mark = mark_of(ARGV[3], ARGV[4])
local workflows = ARGV[5] ~= '' and cjson.decode(ARGV[5])
local to = ARGV[6] ~= '' and ARGV[6] or now_text

local function is_wanted(id, at, shard)
    -- The wake time of an owned run is the end of its lease, which is live until then.
    local is_live = at > now and redis.call('HEXISTS', shard .. 'run:' .. id, 'owner') == 1
    return has_prefix(id, prefix) and not is_live
end

local lines, stopped = due_runs(workflows, to, mark, tonumber(ARGV[1]), is_wanted)
for number, line in ipairs(lines) do
    local _, id, at = unpack(line)
    lines[number] = at .. ' ' .. id
end
return {stopped, lines}
