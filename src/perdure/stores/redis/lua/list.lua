-- KEYS: lists of runs by status. ARGV: limit, prefix, time and id to go on from or "", workflow.
-- Gives where it stopped or nil, and "<number of the list> <time> <line>" for each run, newest
-- first.
local prefix = ARGV[2]
local mark = mark_of(ARGV[3], ARGV[4])
local workflow = workflow_of(ARGV[5])

local function wanted(line)
    local id = id_of(line)
    return begins_with(id, prefix) and (not workflow or line == id .. '\0' .. workflow)
end

local from = mark and text(mark.score) or '+inf'
local lines, stopped = merge(KEYS, true, from, '-inf', mark, tonumber(ARGV[1]), wanted)
for number, line in ipairs(lines) do
    local key, member, at = unpack(line)
    lines[number] = key .. ' ' .. at .. ' ' .. member
end
return {stopped, lines}
