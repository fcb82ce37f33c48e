-- Writes entries of any runs, in order, each if its epoch is open.
-- KEYS: the run of each entry. ARGV, three values per entry: its place in the journal, its data and
-- its effects: "" for none, "delete", or JSON that a NUL and a summary may follow. Returns one
-- character for each entry: (A)ccepted, (F)enced or (U)nknown. steps.lua wrote the entries before
-- `number`.

-- Consumes messages and writes the entry or the rest. Both happen in one script, so a message is
-- consumed if and only if the entry that names it is written.
local function apply(run, place, data, effects)
    local shard, id = shard_and_id(run)
    if effects == 'delete' then
        delete(shard, id)
        return
    end
    local changes, summary = decode(effects)
    if not changes.rest then
        if in_cluster then
            redis.call('EXISTS', run, shard .. 'inbox:' .. id)
        end
        consume(shard, id, changes.consumes)
        redis.call('HSET', run, place, data)
        return
    end
    local old = read_header(run)
    local new = header_at_rest(run, old, changes.rest, summary)
    new.epoch, new.settled, new.snapshot = epoch_of(place), place, data
    settle(shard, id, old, new, changes.consumes)
end

for at = number, #KEYS do
    local run, place, data, effects = KEYS[at], unpack(ARGV, 3 * at - 2, 3 * at)
    local verdict, is_new = judge(run, place)
    verdicts[at] = verdict
    if is_new and effects == '' then
        redis.call('HSETNX', run, place, data)
    elseif is_new and redis.call('HEXISTS', run, place) == 0 then
        apply(run, place, data, effects)
    end
end
return table.concat(verdicts)
