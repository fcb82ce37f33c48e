-- Releases leases, each if it is still held. Removing the owner closes the epoch.
-- KEYS: the run of each lease. ARGV: the wake time or "", then epoch and owner of each lease.
local at = ARGV[1] ~= '' and ARGV[1] or now_text
for number, run in ipairs(KEYS) do
    local header = read_header(run)
    if header and header.epoch == ARGV[2 * number] and header.owner == ARGV[2 * number + 1] then
        local shard, id = shard_and_id(run)
        require_keys(shard, {run, shard .. 'wake:' .. wake_set_of(id, header)})
        redis.call('HDEL', run, 'owner')
        redis.call('HSET', run, 'wake', at)
        schedule(shard, id, header, at)
        if tonumber(at) <= now and not in_system_queue(header) then
            notify(shard)
        end
    end
end
