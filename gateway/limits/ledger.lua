-- The ledger of gateway/limits/ledger.py in Redis: the same decisions, in one script.
--
-- KEYS: one hash a counter, all with one hash tag, so that a cluster has them in one place.
--   of a window  u: what counts; o, n: the oldest and the newest bucket; <bucket>: its amount
--   of the rest  s: spent on the day d; h:<holder>: what it holds; t:<holder>: until when, in seconds
-- Numbers are doubles, exact below 2^53; they are written with %.0f, since Lua would write 1e+15.
--
-- ARGV: 'ask', holder, seconds a hold lives, then for each key measure, most, amount, extra
--       'post', holder, seconds a hold lives, number of changes, then for each change's key measure, held, spent, bucket, then
--               for each hold's key measure, held; then the dead holders
-- Answers: ask: {1, bucket, left..., extras...}, or {0, place, wait in ms or -1, reset in ms, left}; post: {1}.
--
-- Gateways send no time: their clocks differ. The server's may step. After a step back, what was counted in its future counts
-- as if it had come now, so nobody is locked out for longer than a window; after a step forth it is forgotten early, once.

local WINDOW_S, BUCKET_S, DAY_S, FREE_SOON_S = 60, 0.5, 86400, 1
local LEASE_BUCKETS = 3 -- as in ledger.py
local PARALLEL, TOKENS_DAY = 2, 3

local function clock()
  local time = redis.call('TIME')
  return tonumber(time[1]) + tonumber(time[2]) / 1e6
end

local now = clock()
local bucket_now = math.floor(now / BUCKET_S)
local day = math.floor(now / DAY_S)
local holder, hold_s = ARGV[2], tonumber(ARGV[3])

local function text(number)
  return string.format('%.0f', number + 0) -- of -0, which Redis takes for no integer, makes 0
end

local function end_of(bucket)
  return (bucket + 1) * BUCKET_S + WINDOW_S
end

-- Windows ---------------------------------------------------------------------------------------------------------------------

local function load_amounts(key)
  local amounts = {}
  local fields = redis.call('HGETALL', key)
  for i = 1, #fields, 2 do
    local bucket = tonumber(fields[i])
    if bucket then amounts[bucket] = tonumber(fields[i + 1]) end
  end
  return amounts
end

-- What counts now. Looks at every bucket only when the oldest has ended, or the newest is in the future.
local function window_used(key)
  local known = redis.call('HMGET', key, 'u', 'o', 'n')
  if not known[1] then return 0 end
  local oldest, newest = tonumber(known[2]), tonumber(known[3])
  if now < end_of(oldest) and newest <= bucket_now + LEASE_BUCKETS then return tonumber(known[1]) end
  local kept, used = {}, 0
  for bucket, amount in pairs(load_amounts(key)) do
    if bucket > bucket_now + LEASE_BUCKETS then bucket = bucket_now end
    if now < end_of(bucket) then
      kept[bucket] = (kept[bucket] or 0) + amount
      used = used + amount
    end
  end
  redis.call('DEL', key)
  oldest, newest = nil, nil
  for bucket, amount in pairs(kept) do
    redis.call('HSET', key, text(bucket), text(amount))
    if not oldest or bucket < oldest then oldest = bucket end
    if not newest or bucket > newest then newest = bucket end
  end
  if oldest then
    redis.call('HSET', key, 'u', text(used), 'o', text(oldest), 'n', text(newest))
    redis.call('EXPIRE', key, 2 * WINDOW_S)
  end
  return used
end

local function window_add(key, amount, bucket)
  local known = redis.call('HMGET', key, 'o', 'n')
  local oldest = math.min(tonumber(known[1] or bucket), bucket)
  local newest = math.max(tonumber(known[2] or bucket), bucket)
  redis.call('HINCRBY', key, 'u', text(amount))
  redis.call('HINCRBY', key, text(bucket), text(amount))
  redis.call('HSET', key, 'o', text(oldest), 'n', text(newest))
  redis.call('EXPIRE', key, 2 * WINDOW_S)
end

local function window_change(key, spent, bucket)
  window_used(key)
  local amount = tonumber(redis.call('HGET', key, text(bucket)) or nil)
  if not amount then return end -- that minute is over
  spent = math.max(spent, -amount)
  redis.call('HINCRBY', key, 'u', text(spent))
  redis.call('HINCRBY', key, text(bucket), text(spent))
end

local function window_wait(key, excess)
  local buckets = {}
  local amounts = load_amounts(key)
  for bucket in pairs(amounts) do buckets[#buckets + 1] = bucket end
  table.sort(buckets)
  for _, bucket in ipairs(buckets) do
    excess = excess - amounts[bucket]
    if excess <= 0 then return end_of(bucket) - now end
  end
  return WINDOW_S
end

local function window_reset(key)
  local newest = redis.call('HGET', key, 'n')
  return newest and end_of(tonumber(newest)) - now or 0
end

-- What is held, and what a day has spent --------------------------------------------------------------------------------------

local function forget(key, name)
  redis.call('HDEL', key, 'h:' .. name, 't:' .. name)
end

-- What is held, and what was spent today.
local function held_used(key, measure)
  local holds, untils, spent, spent_on = {}, {}, 0, nil
  local fields = redis.call('HGETALL', key)
  for i = 1, #fields, 2 do
    local name, value = fields[i], tonumber(fields[i + 1])
    local kind = string.sub(name, 1, 2)
    if kind == 'h:' then holds[string.sub(name, 3)] = value
    elseif kind == 't:' then untils[string.sub(name, 3)] = value
    elseif name == 's' then spent = value
    elseif name == 'd' then spent_on = value
    end
  end
  local held = 0
  for name, amount in pairs(holds) do
    local till = untils[name] or 0
    if till <= now then
      forget(key, name)
    else
      held = held + amount
      if till > now + hold_s then redis.call('HSET', key, 't:' .. name, string.format('%.3f', now + hold_s)) end
    end
  end
  if measure < TOKENS_DAY then return held, 0 end
  if spent_on ~= day then
    redis.call('HSET', key, 's', '0', 'd', text(day))
    redis.call('EXPIRE', key, 2 * DAY_S)
    spent = 0
  end
  return held, spent
end

local function keep(key, measure)
  redis.call('EXPIRE', key, measure < TOKENS_DAY and math.ceil(2 * hold_s) or 2 * DAY_S)
end

local function hold(key, measure, amount)
  redis.call('HINCRBY', key, 'h:' .. holder, text(amount))
  redis.call('HSET', key, 't:' .. holder, string.format('%.3f', now + hold_s))
  keep(key, measure)
end

local function held_change(key, measure, held, spent)
  local _, spent_before = held_used(key, measure)
  local known = tonumber(redis.call('HGET', key, 'h:' .. holder) or nil)
  if known then redis.call('HINCRBY', key, 'h:' .. holder, text(math.max(held, -known))) end
  if measure >= TOKENS_DAY then redis.call('HINCRBY', key, 's', text(math.max(spent, -spent_before))) end
end

-- Both ------------------------------------------------------------------------------------------------------------------------

local function ask()
  local wants, worst = {}, nil
  for place, key in ipairs(KEYS) do
    local at = 4 + 4 * (place - 1)
    local want = { measure = tonumber(ARGV[at]), most = tonumber(ARGV[at + 1]), amount = tonumber(ARGV[at + 2]) }
    want.extra = tonumber(ARGV[at + 3])
    local used, spent = 0, 0
    if want.measure < PARALLEL then
      used = window_used(key)
    else
      used, spent = held_used(key, want.measure)
    end
    want.left = want.most - used - spent - want.amount
    if want.left < 0 then
      local wait, reset = FREE_SOON_S, used > 0 and FREE_SOON_S or 0
      if want.measure < PARALLEL then
        wait, reset = window_wait(key, -want.left), window_reset(key)
      elseif want.measure >= TOKENS_DAY then
        reset = DAY_S - now % DAY_S
        if -want.left > used then wait = reset end
      end
      if want.amount > want.most then wait = -0.001 end
      if not worst or (worst[3] >= 0 and (wait < 0 or wait * 1000 > worst[3])) then
        worst = { 0, place - 1, math.ceil(wait * 1000), math.ceil(reset * 1000), math.max(0, want.left + want.amount) }
      end
    end
    wants[place] = want
  end
  if worst then return worst end
  local answer = { 1, bucket_now }
  for place, key in ipairs(KEYS) do
    local want = wants[place]
    local extra = math.min(want.extra, want.left)
    answer[2 + place] = want.left - extra
    answer[2 + #KEYS + place] = extra
    if want.measure < PARALLEL then
      window_add(key, want.amount + extra, want.extra > 0 and bucket_now + LEASE_BUCKETS or bucket_now)
    else
      hold(key, want.measure, want.amount + extra)
    end
  end
  return answer
end

local function post()
  local changes = tonumber(ARGV[4])
  local at = 5
  for place, key in ipairs(KEYS) do
    local measure, held = tonumber(ARGV[at]), tonumber(ARGV[at + 1])
    if place <= changes then
      local spent, bucket = tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3])
      if measure < PARALLEL then
        window_change(key, spent, bucket)
      else
        held_change(key, measure, held, spent)
      end
      at = at + 4
    else
      at = at + 2
    end
  end
  local first_dead = at
  at = 5 + 4 * changes
  for place = changes + 1, #KEYS do
    local key, measure, held = KEYS[place], tonumber(ARGV[at]), tonumber(ARGV[at + 1])
    for dead = first_dead, #ARGV do forget(key, ARGV[dead]) end
    held_used(key, measure)
    if held > 0 and redis.call('HEXISTS', key, 'h:' .. holder) == 0 then
      hold(key, measure, held)
    elseif redis.call('HEXISTS', key, 'h:' .. holder) == 1 then
      hold(key, measure, 0)
    end
    at = at + 2
  end
  return { 1 }
end

if ARGV[1] == 'ask' then return ask() end
return post()
