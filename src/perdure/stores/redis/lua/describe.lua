-- Returns a run as one string, without its snapshot: fields separated by NUL, of which the last,
-- the summary, may contain any bytes. Also returns its header; false for a missing run.
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
