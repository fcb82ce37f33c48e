-- Gives a run to an owner: {id, facts, snapshot, journal, inbox}. The facts are one text: epoch,
-- now, end of the lease, takeovers, and what the caller adds.
local function grant(shard, id, owner, ttl, more)
    local run = shard .. 'run:' .. id
    local was = redis.call('HMGET', run, 'status', 'workflow', 'updated', 'owner', 'wake', 'takeovers')
    local workflow = was[2] or nil
    local takeovers = tonumber(was[6] or 0)
    look(shard, id, workflow)
    if was[4] and tonumber(was[5]) <= now then
        takeovers = takeovers + 1
    end
    local epoch = tick(shard)
    local ends = text(now + ttl)
    write(run, {
        status = 'running',
        owner = owner,
        epoch = epoch,
        wake = ends,
        takeovers = takeovers,
    })
    redis.call('HDEL', run, 'awaits', 'folded')
    if was[1] ~= 'running' then
        delist(shard, id, workflow, was[1])
        enlist(shard, id, workflow, 'running', was[3])
    end
    wake(shard, id, workflow, ends)
    local facts = table.concat({epoch, text(now), ends, takeovers, more}, ' ')
    local snapshot, journal = unpack(content(run))
    return {id, facts, snapshot, journal, redis.call('HGETALL', shard .. 'mail:' .. id)}
end
