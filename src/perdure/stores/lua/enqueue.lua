-- KEYS: the new runs. ARGV, three for each: workflow, wake time or "", snapshot. Gives for each 1
-- when it was created, and 0 when it was there.
local answers = {}
for number, run in ipairs(KEYS) do
    answers[number] = 1 - redis.call('EXISTS', run)
    if answers[number] == 1 then
        local shard, id = shard_and_id(run)
        local workflow = workflow_of(ARGV[3 * number - 2])
        local at = ARGV[3 * number - 1]
        at = at ~= '' and at or text(now)
        create(shard, id, workflow, ARGV[3 * number])
        redis.call('HSET', run, 'wake', at)
        wake(shard, id, workflow, at)
        if tonumber(at) <= now then
            hint(shard)
        end
    end
end
return answers
