-- Leases runs by id, creating those that do not exist.
-- KEYS: the run of each request. ARGV, six for each: owner, ttl, "1" if an existing run is
-- accepted, workflow, an owner whose lease is taken over or "", and the first snapshot or "".
-- Returns now, a word for each request, and the grants. The word is the epoch of a run that was
-- created, "+" if there is a grant, or "-". All words are one string, which a client reads much
-- faster than many.
local words, grants = {}, {}

for number, run in ipairs(KEYS) do
    local owner, ttl, existing, workflow, instead_of, snapshot = unpack(
        ARGV, 6 * number - 5, 6 * number
    )
    local shard, id = shard_and_id(run)
    local header = redis.call('EXISTS', run) == 1 and read_header(run, instead_of)
    words[number] = '-'
    if not header and snapshot ~= '' then
        local ends = integer(now + ttl)
        words[number] = create(shard, id, workflow_of(workflow), snapshot, ends, owner)
    elseif header and existing == '1' and (header.is_free or header.owner == owner) then
        words[number] = '+'
        grants[#grants + 1] = grant(shard, id, header, owner, ttl, '')
    end
end
return {now_text, table.concat(words, ' '), grants}
