-- Puts messages in the inboxes of runs, and leases runs that await them. Runs that are not leased
-- become due.
-- KEYS: the run of each message. ARGV: the sender, owner, ttl, limit and supported workflows as JSON,
-- then three for each message, see messages.lua. Returns one string, in three parts that are followed
-- by a NUL: a word for each message, "1" if a run became due or "", and the grants.
local sender, owner, ttl = ARGV[1], ARGV[2], ARGV[3]
local limit, supports = tonumber(ARGV[4]), cjson.decode(ARGV[5])

local function is_executable(header)
    return header.queue == '' and includes(supports, header.workflow, header.version)
end

read_recipients()
for _, recipient in pairs(in_cluster and recipients or {}) do
    local shard, id, header = recipient.shard, recipient.id, recipient.header
    -- A script that was aborted after it had sent a message would not make the run due.
    require_keys(shard, keys_of_grant(shard, id, header))
end
local words = deliver_all(6)
for _, recipient in ipairs(awaiting) do
    local header = recipient.header
    if limit > 0 and is_executable(header) then
        limit = limit - 1
        grant(recipient.shard, recipient.id, header, owner, ttl, false, '')
    else
        make_due(recipient, sender)
    end
end
return table.concat({words, is_notified and '1' or '', table.concat(grants)}, '\0')
