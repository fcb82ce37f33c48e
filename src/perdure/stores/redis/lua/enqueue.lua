-- Creates runs that wait for a claim.
-- KEYS: the new runs. ARGV: the sender, the time of the call or "" for now, then nine for each:
-- workflow, wake time or "", head start, queue, version, tags, summary, rest as JSON with a summary
-- after a NUL or "", and the snapshot. Returns for each 1 if it was created, and 0 if it existed.
local called = ARGV[2] ~= '' and tonumber(ARGV[2]) or now

local function enqueue(run, workflow, at, head_start, queue, version, tags, summary, rest, snapshot)
    local shard, id = shard_and_id(run)
    local new = {
        workflow = workflow, queue = queue, version = version, tags = tags, created = now_text
    }
    if rest ~= '' then
        local state, rest_summary = decode(rest)
        new = header_at_rest(run, new, state, rest_summary or summary)
        new.snapshot = snapshot
        settle(shard, id, nil, new, {})
        return
    end
    new.status, new.summary, new.snapshot = 'queued', summary, snapshot
    new.wake = at ~= '' and at or integer(called - head_start)
    create(shard, id, new)
    if tonumber(new.wake) <= now and not in_system_queue(new) then
        notify(shard, ARGV[1])
    end
end

local answers = {}
for number, run in ipairs(KEYS) do
    answers[number] = 1 - redis.call('EXISTS', run)
    if answers[number] == 1 then
        enqueue(run, unpack(ARGV, 9 * number - 6, 9 * number + 2))
    end
end
return answers
