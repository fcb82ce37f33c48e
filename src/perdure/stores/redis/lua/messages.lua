-- Puts messages in the inboxes of runs. Placed before scripts whose KEYS are the run of each message,
-- and whose ARGV end with three values for each message: name, payload, dedup id as "=<id>" or "".

-- The runs that exist, by key; and those that await a message that was put in their inbox, each once
-- and in order. A recipient has a shard, an id, a header and the names that the run awaits. Only runs
-- without an owner await messages.
local recipients, awaiting = {}, {}

-- Reads all recipients, before the first write.
local function read_recipients()
    for _, run in ipairs(KEYS) do
        local header = not recipients[run] and read_header(run)
        if header then
            local shard, id = shard_and_id(run)
            require_keys(shard, {
                run, shard .. 'inbox:' .. id, shard .. 'dedup:' .. id,
                shard .. 'wake:' .. wake_set_of(id, header)
            })
            local awaits = redis.call('HGET', run, 'awaits')
            recipients[run] = {
                shard = shard, id = id, header = header, awaits = awaits and cjson.decode(awaits)
            }
        end
    end
end

local function awaits_message(recipient, name)
    for _, awaited_name in ipairs(recipient.awaits or {}) do
        if awaited_name == name then
            return true
        end
    end
    return false
end

local function deliver(recipient, name, payload, dedup_id)
    local shard, id, status = recipient.shard, recipient.id, recipient.header.status
    local inbox, dedup = shard .. 'inbox:' .. id, shard .. 'dedup:' .. id
    -- Checked before the status: a duplicate is reported as one even after the run has ended.
    if dedup_id ~= '' and redis.call('SISMEMBER', dedup, dedup_id) == 1 then
        return 'K' .. redis.call('ZCARD', inbox)
    end
    if status == 'completed' or status == 'failed' or status == 'cancelled' then
        return 'O0'
    end
    if dedup_id ~= '' then
        redis.call('SADD', dedup, dedup_id)
    end
    local number = next_number(shard)
    redis.call('ZADD', inbox, number, number .. ' ' .. #name .. ' ' .. name .. payload)
    if awaits_message(recipient, name) and not recipient.is_awaiting then
        recipient.is_awaiting = true
        awaiting[#awaiting + 1] = recipient
    end
    return 'D' .. redis.call('ZCARD', inbox)
end

-- Puts all messages in inboxes; `first` is the index of the first message in ARGV. Returns a word for
-- each, all in one string: a character (Delivered, Known already, Unknown run, or Over) and the
-- number of messages that the inbox then has.
local function deliver_all(first)
    local words = {}
    for number, run in ipairs(KEYS) do
        local recipient, at = recipients[run], first + 3 * (number - 1)
        words[number] = recipient and deliver(recipient, unpack(ARGV, at, at + 2)) or 'U0'
    end
    return table.concat(words, ' ')
end

local function make_due(recipient, sender)
    local shard, id = recipient.shard, recipient.id
    redis.call('HSET', shard .. 'run:' .. id, 'wake', now_text)
    schedule(shard, id, recipient.header, now_text)
    notify(shard, sender)
end
