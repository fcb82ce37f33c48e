-- Gives how a run lies. Its lease is over when there is none, too.
local function last_of(run)
    local status, workflow, updated, owner, epoch, ends, takeovers = unpack(
        redis.call(
            'HMGET', run, 'status', 'workflow', 'updated', 'owner', 'epoch', 'wake', 'takeovers'
        )
    )
    return {
        status = status,
        workflow = workflow or nil,
        updated = updated,
        owner = owner or nil,
        epoch = epoch,
        is_over = not owner or tonumber(ends) <= now,
        takeovers = takeovers or 0,
    }
end

-- Gives a run to an owner: {facts, content}, and its inbox if there is something in it. The facts
-- are one text: epoch, now, end of the lease, takeovers, what the caller adds, and the id.
local function grant(shard, id, was, owner, ttl, more)
    local run = shard .. 'run:' .. id
    look(shard, id, was.workflow)
    local data, last = content(run)
    local takeovers = was.takeovers
    -- A place in the journal begins with the epoch.
    if last and string.sub(last, 1, #was.epoch) == was.epoch then
        takeovers = 0
    elseif was.owner and was.is_over then
        takeovers = takeovers + 1
    end
    local epoch, ends = tick(shard), text(now + ttl)
    redis.call(
        'HSET', run, 'status', 'running', 'owner', owner, 'epoch', epoch, 'wake', ends,
        'takeovers', takeovers
    )
    redis.call('HDEL', run, 'awaits', 'folded')
    if was.status ~= 'running' then
        delist(shard, id, was.workflow, was.status)
        enlist(shard, id, was.workflow, 'running', was.updated)
    end
    wake(shard, id, was.workflow, ends)
    local mail = redis.call('HGETALL', shard .. 'mail:' .. id)
    local facts = table.concat({epoch, moment, ends, takeovers, more, id}, ' ')
    return {facts, data, mail[1] and mail}
end
