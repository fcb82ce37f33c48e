-- Leases runs by id, creating those that do not exist.
-- KEYS: the run of each request. ARGV, nine values per request: owner, ttl, "1" if an existing run
-- is accepted, an owner whose lease is taken over or "", workflow, version, tags, summary, and the
-- first snapshot or "". Returns the current time, a word for each request, and the grants as one
-- string. The word is the epoch of a run that was created, "+" if there is a grant, or "-". All words
-- are in one string as well.
local words = {}

for number, run in ipairs(KEYS) do
    local owner, ttl, existing, instead_of, workflow, version, tags, summary, snapshot = unpack(
        ARGV, 9 * number - 8, 9 * number
    )
    local shard, id = shard_and_id(run)
    local header = read_header(run)
    local may_grant = header and (is_free(header, instead_of) or header.owner == owner)
    words[number] = '-'
    if not header and snapshot ~= '' then
        words[number] = create(shard, id, {
            status = 'running', workflow = workflow, queue = '', version = version, tags = tags,
            summary = summary, snapshot = snapshot, wake = integer(now + ttl), owner = owner
        })
    elseif existing == '1' and may_grant then
        words[number] = '+'
        local is_abandoned = is_free(header, instead_of)
        grant(shard, id, header, owner, ttl, is_abandoned, '')
    end
end
return {now_text, table.concat(words, ' '), table.concat(grants)}
