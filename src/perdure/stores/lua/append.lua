-- KEYS: the run of each entry. ARGV, four for each: epoch, place in the journal, data, and what
-- else it does as JSON, or "". Gives a letter for each: Accepted, Fenced, Unknown.
local verdicts = {}

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

for number, run in ipairs(KEYS) do
    local at = 4 * number
    local epoch, place = ARGV[at - 3], ARGV[at - 2]
    local header = redis.call('HMGET', run, 'epoch', 'folded')
    if not header[1] then
        verdicts[number] = 'U'
    elseif header[1] ~= epoch then
        verdicts[number] = 'F'
    else
        verdicts[number] = 'A'
        -- Both are of this epoch, and as long as each other: their digits tell which is later.
        local is_new = not header[2] or place > header[2]
        if is_new and ARGV[at] == '' then
            redis.call('HSETNX', run, place, ARGV[at - 1])
        elseif is_new and redis.call('HEXISTS', run, place) == 0 then
            deed(run, epoch, place, ARGV[at - 1], cjson.decode(ARGV[at]))
        end
    end
end
return table.concat(verdicts)
