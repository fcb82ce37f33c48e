-- Returns whether a lease can be granted: the run has no owner, its lease has expired, or its owner
-- is `instead_of`.
local function is_free(header, instead_of)
    return not header.owner or tonumber(header.wake) <= now or header.owner == instead_of
end

-- The maximum number of messages in a grant; the same as perdure.store.INBOX_PAGE.
local INBOX_PAGE = 1000

-- The strings of all grants, each after its length and a colon. They are returned as one string, because
-- a client reads one string much faster than many.
local grants = {}
local function add_to_grants(text)
    grants[#grants + 1] = #text .. ':'
    grants[#grants + 1] = text
end

-- Returns the header that determines the list of a run which has been leased.
local function running(header)
    return {status = 'running', workflow = header.workflow, updated = header.updated}
end

-- Returns the keys that `grant` uses, besides the indexes of the shard.
local function keys_of_grant(shard, id, header)
    return {
        shard .. 'run:' .. id,
        shard .. 'inbox:' .. id,
        shard .. 'list:' .. list_of(id, header),
        shard .. 'list:' .. list_of(id, running(header)),
        shard .. 'wake:' .. wake_set_of(id, header),
    }
end

-- Leases a run to an owner, with a new epoch that fences out the previous owner. `is_abandoned` is
-- whether the previous owner, if there is one, has lost the run. Adds the facts, the content and the
-- messages of the run to `grants`. The facts are one string: epoch, current time, end of the lease,
-- takeovers, version, number of messages, wake time as passed in, queue and id.
local function grant(shard, id, header, owner, ttl, is_abandoned, wake_time)
    local run = shard .. 'run:' .. id
    require_keys(shard, keys_of_grant(shard, id, header))
    local data, last = content(run)
    local takeovers = header.takeovers
    -- A place in the journal starts with its epoch, so this is whether the last owner wrote an entry.
    if last and string.sub(last, 1, #header.epoch) == header.epoch then
        takeovers = 0
    elseif header.owner and is_abandoned then
        takeovers = takeovers + 1
    end
    local epoch, ends = next_number(shard), integer(now + ttl)
    redis.call(
        'HSET', run, 'status', 'running', 'owner', owner, 'epoch', epoch, 'wake', ends,
        'takeovers', takeovers
    )
    redis.call('HDEL', run, 'awaits', 'settled')
    if header.status ~= 'running' then
        remove_from_list(shard, id, header)
        add_to_list(shard, id, running(header))
    end
    schedule(shard, id, header, ends)
    local inbox = redis.call('ZRANGE', shard .. 'inbox:' .. id, 0, INBOX_PAGE - 1)
    add_to_grants(table.concat(
        {epoch, now_text, ends, takeovers, header.version, #inbox, wake_time, header.queue, id}, '\0'
    ))
    add_to_grants(data)
    for _, message in ipairs(inbox) do
        add_to_grants(message)
    end
end
