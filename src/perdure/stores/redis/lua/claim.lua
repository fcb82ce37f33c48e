-- KEYS: the lanes of shards. ARGV: limit, prefix, time and id to go on from or "", lanes as JSON
-- or "", owner, ttl. Gives where it stopped or nil, and a grant for each run, with its wake time.
local prefix = ARGV[2]
local mark = mark_of(ARGV[3], ARGV[4])
local lanes = ARGV[5] ~= '' and cjson.decode(ARGV[5])

local function wanted(id)
    return begins_with(id, prefix)
end

local lines, stopped = agenda(lanes, moment, mark, tonumber(ARGV[1]), wanted)
local grants = {}
for number, line in ipairs(lines) do
    local shard, id, at = unpack(line)
    local was = last_of(shard .. 'run:' .. id)
    grants[number] = grant(shard, id, was, ARGV[6], ARGV[7], at)
end
return {stopped, grants}
