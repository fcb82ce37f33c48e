-- Puts messages in the inboxes of runs, and makes runs due that await them.
-- KEYS: the run of each message. ARGV: the sender, then three for each message: name, payload, dedup
-- id as "=<id>" or "".
-- Returns a word for each, all in one string: a character (Delivered, Known already, Unknown run,
-- or Over) and the number of messages that the inbox then has.
local function is_awaited(run, name)
    local awaits = redis.call('HGET', run, 'awaits')
    for _, awaited_name in ipairs(awaits and cjson.decode(awaits) or {}) do
        if awaited_name == name then
            return true
        end
    end
    return false
end

local function send(run, name, payload, dedup_id)
    local shard, id = shard_and_id(run)
    local inbox, dedup = shard .. 'inbox:' .. id, shard .. 'dedup:' .. id
    local header = read_header(run)
    if not header then
        return 'U0'
    end
    local status = header.status
    require_keys(shard, {run, inbox, dedup, shard .. 'wake:' .. wake_set_of(id, header)})
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
    if is_awaited(run, name) then
        redis.call('HSET', run, 'wake', now_text)
        schedule(shard, id, header, now_text)
        notify(shard, ARGV[1])
    end
    return 'D' .. redis.call('ZCARD', inbox)
end

local words = {}
for number, run in ipairs(KEYS) do
    words[number] = send(run, unpack(ARGV, 3 * number - 1, 3 * number + 1))
end
return table.concat(words, ' ')
