-- Returns the header of a run. `is_free` also holds for a lease that has expired, and for one that
-- belongs to `instead_of`, if it is given.
local function read_header(run, instead_of)
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
        is_free = not owner or tonumber(ends) <= now or owner == instead_of,
        takeovers = takeovers or 0,
    }
end

-- Leases a run to an owner, with a new epoch that fences out the previous one. Returns
-- {facts, content, inbox}, without the inbox if it is empty. The facts are one string: epoch, now,
-- end of the lease, takeovers, wake time as passed in, and id.
local function grant(shard, id, header, owner, ttl, wake_time)
    local run = shard .. 'run:' .. id
    require_keys(shard, id, header.workflow)
    local data, last = content(run)
    local takeovers = header.takeovers
    -- A place in the journal starts with the epoch: the last owner wrote an entry.
    if last and string.sub(last, 1, #header.epoch) == header.epoch then
        takeovers = 0
    elseif header.owner and header.is_free then
        takeovers = takeovers + 1
    end
    local epoch, ends = next_number(shard), integer(now + ttl)
    redis.call(
        'HSET', run, 'status', 'running', 'owner', owner, 'epoch', epoch, 'wake', ends,
        'takeovers', takeovers
    )
    redis.call('HDEL', run, 'awaits', 'settled')
    if header.status ~= 'running' then
        remove_from_list(shard, id, header.workflow, header.status)
        add_to_list(shard, id, header.workflow, 'running', header.updated)
    end
    schedule(shard, id, header.workflow, ends)
    local inbox = redis.call('HGETALL', shard .. 'inbox:' .. id)
    local facts = table.concat({epoch, now_text, ends, takeovers, wake_time, id}, ' ')
    return {facts, data, inbox[1] and inbox}
end
