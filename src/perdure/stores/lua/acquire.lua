-- KEYS: the run of each want. ARGV, five for each: owner, ttl, "1" if a run that is there will do,
-- workflow, and the first snapshot or "". Gives a grant for each, with "1" when it was created, or
-- nil.
local answers = {}

local function is_free(run, owner)
    local was = redis.call('HMGET', run, 'owner', 'wake')
    return not was[1] or was[1] == owner or tonumber(was[2]) <= now
end

for number, run in ipairs(KEYS) do
    local at = 5 * number
    local owner, ttl = ARGV[at - 4], tonumber(ARGV[at - 3])
    local shard, id = shard_and_id(run)
    local is_there = redis.call('EXISTS', run) == 1
    local answer = false
    if is_there and ARGV[at - 2] == '1' and is_free(run, owner) then
        answer = grant(shard, id, owner, ttl, '0')
    elseif not is_there and ARGV[at] ~= '' then
        create(shard, id, workflow_of(ARGV[at - 1]), ARGV[at])
        answer = grant(shard, id, owner, ttl, '1')
    end
    answers[number] = answer
end
return answers
