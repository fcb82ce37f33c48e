-- KEYS: the lanes of shards. ARGV: limit, prefix, time and id to go on from or "", lanes as JSON
-- or "", and the time or "". Gives where it stopped or nil, and "<time> <id>" for each run.
local prefix = ARGV[2]
local mark = mark_of(ARGV[3], ARGV[4])
local lanes = ARGV[5] ~= '' and cjson.decode(ARGV[5])
local to = ARGV[6] ~= '' and ARGV[6] or text(now)

local function wanted(id, at, shard)
    -- Of an owned run it is the end of the lease, which lives until then.
    local is_alive = at > now and redis.call('HEXISTS', shard .. 'run:' .. id, 'owner') == 1
    return begins_with(id, prefix) and not is_alive
end

local lines, stopped = agenda(lanes, to, mark, tonumber(ARGV[1]), wanted)
for number, line in ipairs(lines) do
    local _, id, at = unpack(line)
    lines[number] = at .. ' ' .. id
end
return {stopped, lines}
