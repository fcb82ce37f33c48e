-- Puts messages in the inboxes of runs, and makes runs due that await them.
-- KEYS: the run of each message. ARGV: the sender, then three for each message, see messages.lua.
-- Returns a word for each message, all in one string.
read_recipients()
local words = deliver_all(2)
for _, recipient in ipairs(awaiting) do
    make_due(recipient, ARGV[1])
end
return words
