-- KEYS: the run of each want. ARGV, five for each: owner, ttl, "1" if a run that is there will do,
-- workflow, and the first snapshot or "". Gives now; a word for each want, all in one text, for a
-- client reads one text far sooner than many; and the grants. The word is the epoch of a run that
-- was created, "+" where there is a grant, and "-" for nothing.
local words, grants = {}, {}

for number, run in ipairs(KEYS) do
    local owner, ttl, existing, workflow, snapshot = unpack(ARGV, 5 * number - 4, 5 * number)
    local shard, id = shard_and_id(run)
    local was = redis.call('EXISTS', run) == 1 and last_of(run)
    words[number] = '-'
    if not was and snapshot ~= '' then
        local ends = text(now + ttl)
        words[number] = create(shard, id, workflow_of(workflow), snapshot, ends, owner)
    elseif was and existing == '1' and (was.is_over or was.owner == owner) then
        words[number] = '+'
        grants[#grants + 1] = grant(shard, id, was, owner, ttl, '')
    end
end
return {moment, table.concat(words, ' '), grants}
