-- Creates runs that wait for a claim.
-- KEYS: the new runs. ARGV, three for each: workflow, wake time or "", snapshot. Returns for each 1
-- if it was created, and 0 if it existed.
local answers = {}
for number, run in ipairs(KEYS) do
    answers[number] = 1 - redis.call('EXISTS', run)
    if answers[number] == 1 then
        local shard, id = shard_and_id(run)
        local workflow, at, snapshot = unpack(ARGV, 3 * number - 2, 3 * number)
        at = at ~= '' and at or now_text
        create(shard, id, workflow_of(workflow), snapshot, at)
        if tonumber(at) <= now then
            notify(shard)
        end
    end
end
return answers
