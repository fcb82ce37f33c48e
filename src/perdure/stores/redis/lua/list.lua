-- Lists runs, the most recently updated first.
-- KEYS: lists of runs by status. ARGV: limit, prefix, time and id to continue after or "", and
-- workflow. Returns where it stopped or nil, and for each run
-- "<number of the list> <time> <owner or nothing>\0<member>".
local prefix = ARGV[2]
local mark = mark_of(ARGV[3], ARGV[4])
local workflow = workflow_of(ARGV[5])

local function is_wanted(member)
    local id = id_of(member)
    return has_prefix(id, prefix) and (not workflow or member == list_member(id, workflow))
end

local from = mark and integer(mark.score) or '+inf'
local lines, stopped = merge(KEYS, true, from, '-inf', mark, tonumber(ARGV[1]), is_wanted)
for number, line in ipairs(lines) do
    local key, member, at = unpack(line)
    local shard = string.match(KEYS[key], '^([^{]*{[^}]*}:)')
    local owner = redis.call('HGET', shard .. 'run:' .. id_of(member), 'owner') or ''
    lines[number] = key .. ' ' .. at .. ' ' .. owner .. '\0' .. member
end
return {stopped, lines}
