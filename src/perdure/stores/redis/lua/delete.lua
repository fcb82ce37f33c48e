-- KEYS: the run. Gives whether it was there.
local shard, id = shard_and_id(KEYS[1])
return remove(shard, id) and 1 or 0
