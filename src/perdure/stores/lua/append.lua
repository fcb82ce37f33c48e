-- KEYS: the run of each entry. ARGV, four for each: epoch, place in the journal, data, and what
-- else it does as JSON, or "". Gives a letter for each: Accepted, Fenced, Unknown. steps.lua has begun
-- with them, and got as far as `number`.
local function deed(run, epoch, place, data, more)
    local shard, id = shard_and_id(run)
    local workflow = redis.call('HGET', run, 'workflow') or nil
    look(shard, id, workflow)
    for _, message in ipairs(more.takes or {}) do
        redis.call('HDEL', shard .. 'mail:' .. id, message)
    end
    if not more.rest then
        redis.call('HSET', run, place, data)
    elseif more.rest.gone then
        remove(shard, id)
    else
        local header = {epoch = epoch, folded = place, workflow = workflow}
        lay(shard, id, header, data, more.rest)
    end
end

for at = number, #KEYS do
    local run, epoch, place, data, more = KEYS[at], unpack(ARGV, 4 * at - 3, 4 * at)
    local verdict, is_new = judge(run, epoch, place)
    verdicts[at] = verdict
    if is_new and more == '' then
        redis.call('HSETNX', run, place, data)
    elseif is_new and redis.call('HEXISTS', run, place) == 0 then
        deed(run, epoch, place, data, cjson.decode(more))
    end
end
return table.concat(verdicts)
