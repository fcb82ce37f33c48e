-- Returns a run without its snapshot, as one string of fields separated by NUL; the last one, the
-- summary, may contain any bytes. Also returns the run's header. Returns false for a missing run.
local function describe(shard, id)
    local run = shard .. 'run:' .. id
    local header = read_header(run)
    if not header then
        return false
    end
    local rest = redis.call('HMGET', run, 'awaits', 'summary')
    local fields = {
        id, header.status, header.workflow, header.updated, header.created or '',
        header.wake or '', header.owner or '', header.queue, header.version, header.takeovers,
        header.tags, rest[1] or '[]', rest[2] or '',
    }
    return table.concat(fields, '\0'), header
end
