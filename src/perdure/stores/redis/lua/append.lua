-- KEYS: the run of each entry. ARGV, three for each: place in the journal, data, and what else it
-- does: "" for nothing, "gone", or JSON. Gives a letter for each: Accepted, Fenced, Unknown.
-- steps.lua has begun with them, and got as far as `number`.
local function deed(run, place, data, more)
    local shard, id = shard_and_id(run)
    if more == 'gone' then
        remove(shard, id)
        return
    end
    local workflow = redis.call('HGET', run, 'workflow') or nil
    more = cjson.decode(more)
    look(shard, id, workflow)
    for _, message in ipairs(more.takes) do
        redis.call('HDEL', shard .. 'mail:' .. id, message)
    end
    if more.rest then
        lay(shard, id, workflow, epoch_of(place), place, data, more.rest)
    else
        redis.call('HSET', run, place, data)
    end
end

for at = number, #KEYS do
    local run, place, data, more = KEYS[at], unpack(ARGV, 3 * at - 2, 3 * at)
    local verdict, is_new = judge(run, place)
    verdicts[at] = verdict
    if is_new and more == '' then
        redis.call('HSETNX', run, place, data)
    elseif is_new and redis.call('HEXISTS', run, place) == 0 then
        deed(run, place, data, more)
    end
end
return table.concat(verdicts)
