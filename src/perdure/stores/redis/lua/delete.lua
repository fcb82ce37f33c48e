-- Deletes a run and everything that belongs to it.
-- KEYS: the run. Returns 1 if it existed, otherwise 0.
local shard, id = shard_and_id(KEYS[1])
return delete(shard, id) and 1 or 0
