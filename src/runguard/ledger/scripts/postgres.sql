-- Everything of RunGuard in one schema. The name "runguard." is replaced by the schema that the store was given.
-- Locks are taken in one order everywhere: the row of a hold, then accounts by ascending key. Keys are compared byte by byte.
-- Amounts stay between 0 and 2^62 - 1, limits reach 2^62 (no limit): no sum below leaves a bigint.

CREATE TABLE runguard.accounts (
  key text COLLATE "C" PRIMARY KEY, scope text COLLATE "C" NOT NULL, "window" text, ends float8,
  cap_usd bigint NOT NULL, cap_tokens bigint NOT NULL, cap_calls bigint NOT NULL,
  spent_usd bigint NOT NULL DEFAULT 0, spent_tokens bigint NOT NULL DEFAULT 0, spent_calls bigint NOT NULL DEFAULT 0,
  held_usd bigint NOT NULL DEFAULT 0, held_tokens bigint NOT NULL DEFAULT 0, held_calls bigint NOT NULL DEFAULT 0,
  granted_usd bigint NOT NULL DEFAULT 0, granted_tokens bigint NOT NULL DEFAULT 0, granted_calls bigint NOT NULL DEFAULT 0,
  overrun_usd bigint NOT NULL DEFAULT 0, overrun_tokens bigint NOT NULL DEFAULT 0, overrun_calls bigint NOT NULL DEFAULT 0,
  expired_usd bigint NOT NULL DEFAULT 0, expired_tokens bigint NOT NULL DEFAULT 0, expired_calls bigint NOT NULL DEFAULT 0,
  closed boolean NOT NULL DEFAULT false, updated float8 NOT NULL,
  CONSTRAINT accounts_not_negative CHECK (least(
    cap_usd, cap_tokens, cap_calls, spent_usd, spent_tokens, spent_calls, held_usd, held_tokens, held_calls, granted_usd, granted_tokens, granted_calls,
    overrun_usd, overrun_tokens, overrun_calls, expired_usd, expired_tokens, expired_calls) >= 0),
  CONSTRAINT accounts_not_beyond CHECK (greatest(cap_usd, cap_tokens, cap_calls) <= 4611686018427387904 AND greatest(
    spent_usd, spent_tokens, spent_calls, held_usd, held_tokens, held_calls, granted_usd, granted_tokens, granted_calls) < 4611686018427387904)
) WITH (fillfactor = 50);
CREATE INDEX accounts_scope ON runguard.accounts (scope);

CREATE TABLE runguard.holds (
  id text COLLATE "C" PRIMARY KEY, keys text[] NOT NULL, state text NOT NULL, expires float8 NOT NULL, updated float8 NOT NULL,
  usd bigint NOT NULL, tokens bigint NOT NULL, calls bigint NOT NULL,
  CONSTRAINT holds_not_negative CHECK (least(usd, tokens, calls) >= 0),
  CONSTRAINT holds_end CHECK (expires < 'NaN')
) WITH (fillfactor = 70);
CREATE INDEX holds_open ON runguard.holds (expires) WHERE state = 'open';

CREATE TABLE runguard.marks (
  key text COLLATE "C", mark text COLLATE "C", percent float8 NOT NULL, amounts text NOT NULL, PRIMARY KEY (key, mark)
);
CREATE TABLE runguard.documents (name text COLLATE "C" PRIMARY KEY, version bigint NOT NULL, text text NOT NULL);
CREATE TABLE runguard.claims (key text COLLATE "C" PRIMARY KEY, state text NOT NULL, expires float8 NOT NULL);
CREATE TABLE runguard.records (
  seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, at float8 NOT NULL, kind text COLLATE "C" NOT NULL, ref text NOT NULL, text text NOT NULL
);
CREATE INDEX records_kind ON runguard.records (kind, seq);
CREATE TABLE runguard.runs (id text COLLATE "C" PRIMARY KEY, worker text NOT NULL, beat float8 NOT NULL, ended boolean NOT NULL, text text NOT NULL);
CREATE INDEX runs_alive ON runguard.runs (beat) WHERE NOT ended;

-- One row for each account of an answer; a single row without a key where there is none. Where a step was undone, an account comes twice: the later row
-- counts, and so does what the last row says of the whole.
CREATE TYPE runguard.reply AS (
  ok boolean, stale boolean, clock float8, control bigint,
  key text, scope text, "window" text, ends float8,
  cap_usd bigint, cap_tokens bigint, cap_calls bigint, spent_usd bigint, spent_tokens bigint, spent_calls bigint,
  held_usd bigint, held_tokens bigint, held_calls bigint, granted_usd bigint, granted_tokens bigint, granted_calls bigint,
  overrun_usd bigint, overrun_tokens bigint, overrun_calls bigint, expired_usd bigint, expired_tokens bigint, expired_calls bigint,
  closed boolean, updated float8
);

CREATE FUNCTION runguard.clock() RETURNS float8 LANGUAGE sql VOLATILE AS 'SELECT extract(epoch FROM clock_timestamp())::float8';

-- One amount more, or less: it stops at both ends of the range, because what happened is never refused.
CREATE FUNCTION runguard.plus(amount bigint, more bigint) RETURNS bigint LANGUAGE sql IMMUTABLE
AS 'SELECT greatest(0, least(amount, 4611686018427387903 - more) + more)';

-- What a call that billed more than it held adds to the overrun; NULL when it broke no limit.
CREATE FUNCTION runguard.broken(more bigint, due bigint, overrun bigint) RETURNS bigint LANGUAGE sql IMMUTABLE
AS 'SELECT CASE WHEN more > 0 AND due > 0 THEN greatest(overrun, least(due, overrun + more)) END';

-- An account as a line names it: made if new, with the caps in force now.
CREATE FUNCTION runguard.touch(p_key text, p_scope text, p_window text, p_ends float8, p_caps bigint[], p_now float8) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO runguard.accounts AS a (key, scope, "window", ends, cap_usd, cap_tokens, cap_calls, updated)
  VALUES (p_key, p_scope, p_window, p_ends, p_caps[1], p_caps[2], p_caps[3], p_now)
  ON CONFLICT (key) DO UPDATE SET cap_usd = p_caps[1], cap_tokens = p_caps[2], cap_calls = p_caps[3];
END $$;

-- Holds whose time is over and that nobody works on at this moment, locked; NULL when there is none.
CREATE FUNCTION runguard.overdue(p_now float8) RETURNS text[] LANGUAGE sql VOLATILE AS $$
  SELECT array_agg(id) FROM (
    SELECT id FROM runguard.holds WHERE state = 'open' AND expires <= p_now ORDER BY expires LIMIT 64 FOR UPDATE SKIP LOCKED
  ) AS late
$$;

-- Charge overdue holds. The caller has locked their accounts.
CREATE FUNCTION runguard.charge(p_ids text[], p_now float8) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  UPDATE runguard.accounts AS a SET
    held_usd = runguard.plus(held_usd, -usd), held_tokens = runguard.plus(held_tokens, -tokens), held_calls = runguard.plus(held_calls, -calls),
    spent_usd = runguard.plus(spent_usd, usd), spent_tokens = runguard.plus(spent_tokens, tokens), spent_calls = runguard.plus(spent_calls, calls),
    expired_usd = runguard.plus(expired_usd, usd), expired_tokens = runguard.plus(expired_tokens, tokens),
    expired_calls = runguard.plus(expired_calls, calls), updated = p_now
  FROM (
    SELECT k, least(sum(usd), 4611686018427387903)::bigint AS usd, least(sum(tokens), 4611686018427387903)::bigint AS tokens,
      least(sum(calls), 4611686018427387903)::bigint AS calls
    FROM runguard.holds, unnest(keys) AS k WHERE id = ANY (p_ids) GROUP BY k
  ) AS late WHERE a.key = late.k;
  UPDATE runguard.holds SET state = 'expired', updated = p_now WHERE id = ANY (p_ids);
END $$;

-- A batch of overdue holds by itself; how many there were.
CREATE FUNCTION runguard.expire() RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
  v_now float8 := runguard.clock();
  v_ids text[] := runguard.overdue(v_now);
BEGIN
  IF v_ids IS NULL THEN
    RETURN 0;
  END IF;
  PERFORM 1 FROM runguard.accounts
  WHERE key IN (SELECT unnest(keys) FROM runguard.holds WHERE id = ANY (v_ids)) ORDER BY key FOR UPDATE;
  PERFORM runguard.charge(v_ids, v_now);
  RETURN cardinality(v_ids);
END $$;

-- Hold an amount on all lines or on none. The lines come sorted by key. The hold is written first: its id guards against its twin.
CREATE FUNCTION runguard.reserve(
  p_hold text, p_ttl float8, p_keys text[], p_scopes text[], p_windows text[], p_begins float8[], p_ends float8[], p_caps bigint[], p_want bigint[],
  p_force boolean
) RETURNS SETOF runguard.reply LANGUAGE plpgsql AS $$
DECLARE
  v_now float8 := extract(epoch FROM clock_timestamp());
  v_control bigint := coalesce((SELECT version FROM runguard.documents WHERE name = 'control'), 0);
  v_lines int := cardinality(p_keys);
  v_ids text[];
  v_key text;
  v_at int;
  v_done int := 0;
  v_stale boolean := false;
  r runguard.reply;
BEGIN
  FOR i IN 1 .. v_lines LOOP
    IF v_now >= p_ends[i] OR v_now < p_begins[i] THEN
      r.ok := false; r.stale := true; r.clock := v_now; r.control := v_control;
      RETURN NEXT r;
      RETURN;
    END IF;
  END LOOP;

  v_ids := runguard.overdue(v_now);
  IF v_ids IS NOT NULL THEN  -- their accounts and ours, in one order
    FOR v_key IN
      SELECT k COLLATE "C" FROM runguard.holds, unnest(keys) AS k WHERE id = ANY (v_ids) UNION SELECT unnest(p_keys) COLLATE "C" ORDER BY 1
    LOOP
      v_at := array_position(p_keys, v_key);
      IF v_at IS NOT NULL THEN
        PERFORM runguard.touch(v_key, p_scopes[v_at], p_windows[v_at], p_ends[v_at], p_caps[3 * v_at - 2 : 3 * v_at], v_now);
      END IF;
      PERFORM 1 FROM runguard.accounts WHERE key = v_key FOR UPDATE;
    END LOOP;
    PERFORM runguard.charge(v_ids, v_now);
  END IF;

  INSERT INTO runguard.holds VALUES (p_hold, p_keys, 'open', v_now + p_ttl, v_now, p_want[1], p_want[2], p_want[3]) ON CONFLICT (id) DO NOTHING;
  IF NOT FOUND THEN
    r.ok := coalesce((SELECT state = 'open' FROM runguard.holds WHERE id = p_hold), false);
    r.stale := false; r.clock := v_now; r.control := v_control;
    RETURN NEXT r;
    RETURN QUERY SELECT r.ok, false, v_now, v_control, a.* FROM runguard.accounts AS a WHERE a.key = ANY (p_keys) ORDER BY a.key;
    RETURN;
  END IF;

  FOR i IN 1 .. v_lines LOOP
    FOR attempt IN 1 .. 2 LOOP
      UPDATE runguard.accounts AS a SET
        cap_usd = p_caps[3 * i - 2], cap_tokens = p_caps[3 * i - 1], cap_calls = p_caps[3 * i], updated = v_now,
        held_usd = runguard.plus(held_usd, p_want[1]), held_tokens = runguard.plus(held_tokens, p_want[2]), held_calls = runguard.plus(held_calls, p_want[3])
      WHERE key = p_keys[i] AND (p_force OR (
        NOT closed AND p_want[1] <= p_caps[3 * i - 2] + granted_usd - spent_usd - held_usd
        AND p_want[2] <= p_caps[3 * i - 1] + granted_tokens - spent_tokens - held_tokens
        AND p_want[3] <= p_caps[3 * i] + granted_calls - spent_calls - held_calls))
      RETURNING true, false, v_now, v_control, a.* INTO r;
      EXIT WHEN FOUND OR attempt = 2;
      PERFORM runguard.touch(p_keys[i], p_scopes[i], p_windows[i], p_ends[i], p_caps[3 * i - 2 : 3 * i], v_now);  -- it may just be new
    END LOOP;
    EXIT WHEN r.key IS NULL;
    v_done := i;
    RETURN NEXT r;
  END LOOP;

  v_now := extract(epoch FROM clock_timestamp());  -- there may have been a queue
  FOR i IN 1 .. v_lines LOOP
    v_stale := v_stale OR coalesce(v_now >= p_ends[i], false);
  END LOOP;
  IF v_done < v_lines OR v_stale THEN
    DELETE FROM runguard.holds WHERE id = p_hold;
    FOR i IN 1 .. v_lines LOOP
      IF i <= v_done THEN
        UPDATE runguard.accounts SET
          held_usd = runguard.plus(held_usd, -p_want[1]), held_tokens = runguard.plus(held_tokens, -p_want[2]),
          held_calls = runguard.plus(held_calls, -p_want[3])
        WHERE key = p_keys[i];
      ELSE
        PERFORM runguard.touch(p_keys[i], p_scopes[i], p_windows[i], p_ends[i], p_caps[3 * i - 2 : 3 * i], v_now);
      END IF;
    END LOOP;
    RETURN QUERY SELECT false, v_stale, v_now, v_control, a.* FROM runguard.accounts AS a WHERE a.key = ANY (p_keys) ORDER BY a.key;
  ELSIF v_lines = 0 THEN
    r.ok := true; r.stale := false; r.clock := v_now; r.control := v_control;
    RETURN NEXT r;
  END IF;
END $$;

-- Take a hold away from one account, put an amount in the place of what was booked there; an excess that breaks a cap closes it.
CREATE FUNCTION runguard.book(p_key text, p_held bigint[], p_booked bigint[], p_actual bigint[], p_expired boolean, p_now float8, p_control bigint)
RETURNS runguard.reply LANGUAGE plpgsql AS $$
DECLARE
  r runguard.reply;
  v_usd bigint; v_tokens bigint; v_calls bigint;
BEGIN
  UPDATE runguard.accounts AS a SET
    held_usd = runguard.plus(held_usd, -p_held[1]), held_tokens = runguard.plus(held_tokens, -p_held[2]), held_calls = runguard.plus(held_calls, -p_held[3]),
    spent_usd = runguard.plus(spent_usd, p_actual[1] - p_booked[1]), spent_tokens = runguard.plus(spent_tokens, p_actual[2] - p_booked[2]),
    spent_calls = runguard.plus(spent_calls, p_actual[3] - p_booked[3]),
    expired_usd = CASE WHEN p_expired THEN runguard.plus(expired_usd, -p_booked[1]) ELSE expired_usd END,
    expired_tokens = CASE WHEN p_expired THEN runguard.plus(expired_tokens, -p_booked[2]) ELSE expired_tokens END,
    expired_calls = CASE WHEN p_expired THEN runguard.plus(expired_calls, -p_booked[3]) ELSE expired_calls END,
    updated = p_now
  WHERE key = p_key RETURNING true, false, p_now, p_control, a.* INTO r;
  IF p_actual[1] > p_held[1] + p_booked[1] OR p_actual[2] > p_held[2] + p_booked[2] OR p_actual[3] > p_held[3] + p_booked[3] THEN
    v_usd := runguard.broken(p_actual[1] - p_held[1] - p_booked[1], r.spent_usd + r.held_usd - r.cap_usd - r.granted_usd, r.overrun_usd);
    v_tokens := runguard.broken(p_actual[2] - p_held[2] - p_booked[2], r.spent_tokens + r.held_tokens - r.cap_tokens - r.granted_tokens, r.overrun_tokens);
    v_calls := runguard.broken(p_actual[3] - p_held[3] - p_booked[3], r.spent_calls + r.held_calls - r.cap_calls - r.granted_calls, r.overrun_calls);
    IF coalesce(v_usd, v_tokens, v_calls) IS NOT NULL THEN
      UPDATE runguard.accounts AS a SET closed = true,
        overrun_usd = coalesce(v_usd, overrun_usd), overrun_tokens = coalesce(v_tokens, overrun_tokens), overrun_calls = coalesce(v_calls, overrun_calls)
      WHERE key = p_key RETURNING true, false, p_now, p_control, a.* INTO r;
    END IF;
  END IF;
  RETURN r;
END $$;

-- What a call took. The lines are for a hold that nobody knows: what was spent is a fact all the same.
CREATE FUNCTION runguard.settle(
  p_hold text, p_keys text[], p_scopes text[], p_windows text[], p_ends float8[], p_caps bigint[], p_actual bigint[]
) RETURNS SETOF runguard.reply LANGUAGE plpgsql AS $$
DECLARE
  v_now float8 := extract(epoch FROM clock_timestamp());
  v_control bigint := coalesce((SELECT version FROM runguard.documents WHERE name = 'control'), 0);
  v_keys text[];
  v_state text;
  v_amount bigint[];
  v_held bigint[] := '{0,0,0}';
  v_booked bigint[] := '{0,0,0}';
  v_key text;
  v_found boolean := false;
  r runguard.reply;
BEGIN
  UPDATE runguard.holds AS h SET state = 'settled', updated = v_now, usd = p_actual[1], tokens = p_actual[2], calls = p_actual[3]
  FROM (SELECT id, keys, state, ARRAY[usd, tokens, calls] AS amount FROM runguard.holds WHERE id = p_hold FOR UPDATE) AS old
  WHERE h.id = old.id RETURNING old.keys, old.state, old.amount INTO v_keys, v_state, v_amount;
  IF v_state IS NULL THEN
    INSERT INTO runguard.holds VALUES (p_hold, p_keys, 'settled', v_now, v_now, p_actual[1], p_actual[2], p_actual[3]) ON CONFLICT (id) DO NOTHING;
    IF NOT FOUND THEN
      RAISE EXCEPTION 'the hold was made at this moment' USING ERRCODE = 'serialization_failure';
    END IF;
    v_keys := p_keys;
    FOR i IN 1 .. cardinality(p_keys) LOOP
      PERFORM runguard.touch(p_keys[i], p_scopes[i], p_windows[i], p_ends[i], p_caps[3 * i - 2 : 3 * i], v_now);
    END LOOP;
  ELSIF v_state = 'open' THEN
    v_held := v_amount;
  ELSIF v_state IN ('settled', 'expired') THEN
    v_booked := v_amount;
  END IF;
  FOREACH v_key IN ARRAY v_keys LOOP
    r := runguard.book(v_key, v_held, v_booked, p_actual, v_state = 'expired', v_now, v_control);
    IF r.key IS NOT NULL THEN
      v_found := true;
      RETURN NEXT r;
    END IF;
  END LOOP;
  IF NOT v_found THEN
    r.ok := true; r.stale := false; r.clock := v_now; r.control := v_control;
    RETURN NEXT r;
  END IF;
END $$;

CREATE FUNCTION runguard.release(p_hold text) RETURNS SETOF runguard.reply LANGUAGE plpgsql AS $$
DECLARE
  v_now float8 := extract(epoch FROM clock_timestamp());
  v_control bigint := coalesce((SELECT version FROM runguard.documents WHERE name = 'control'), 0);
  v_keys text[];
  v_amount bigint[];
  v_key text;
  r runguard.reply;
BEGIN
  r.ok := true; r.stale := false; r.clock := v_now; r.control := v_control;
  RETURN NEXT r;
  UPDATE runguard.holds SET state = 'released', updated = v_now WHERE id = p_hold AND state = 'open'
  RETURNING keys, ARRAY[usd, tokens, calls] INTO v_keys, v_amount;
  IF FOUND THEN
    FOREACH v_key IN ARRAY v_keys LOOP
      r := runguard.book(v_key, v_amount, '{0,0,0}', '{0,0,0}', false, v_now, v_control);
      IF r.key IS NOT NULL THEN
        RETURN NEXT r;
      END IF;
    END LOOP;
  END IF;
END $$;

-- An account that an overrun closed opens when its limit is above what is due.
CREATE FUNCTION runguard.extend(p_key text, p_scope text, p_window text, p_ends float8, p_caps bigint[], p_more bigint[])
RETURNS SETOF runguard.reply LANGUAGE plpgsql AS $$
DECLARE
  v_now float8 := runguard.clock();
BEGIN
  PERFORM runguard.touch(p_key, p_scope, p_window, p_ends, p_caps, v_now);
  UPDATE runguard.accounts SET
    granted_usd = runguard.plus(granted_usd, p_more[1]), granted_tokens = runguard.plus(granted_tokens, p_more[2]),
    granted_calls = runguard.plus(granted_calls, p_more[3])
  WHERE key = p_key;
  RETURN QUERY UPDATE runguard.accounts AS a SET closed = closed AND (
    spent_usd + held_usd > cap_usd + granted_usd OR spent_tokens + held_tokens > cap_tokens + granted_tokens OR spent_calls + held_calls > cap_calls + granted_calls
  ) WHERE key = p_key RETURNING true, false, v_now, 0::bigint, a.*;
END $$;

-- In place of the control version: how many overdue holds were charged for this. A full batch: there may be more.
CREATE FUNCTION runguard.read(p_scope text) RETURNS SETOF runguard.reply LANGUAGE plpgsql AS $$
DECLARE
  v_charged bigint := runguard.expire();
BEGIN
  IF p_scope IS NULL THEN
    RETURN QUERY SELECT true, false, 0::float8, v_charged, a.* FROM runguard.accounts AS a ORDER BY a.key;
  ELSE
    RETURN QUERY SELECT true, false, 0::float8, v_charged, a.* FROM runguard.accounts AS a WHERE a.scope = p_scope ORDER BY a.key;
  END IF;
END $$;

CREATE FUNCTION runguard.put(p_name text, p_version bigint, p_text text) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
  IF p_version = 0 THEN
    INSERT INTO runguard.documents VALUES (p_name, 1, p_text) ON CONFLICT (name) DO NOTHING;
  ELSE
    UPDATE runguard.documents SET version = version + 1, text = p_text WHERE name = p_name AND version = p_version;
  END IF;
  RETURN FOUND;
END $$;

CREATE FUNCTION runguard.beat(p_run text, p_worker text, p_text text, p_ended boolean) RETURNS bigint LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO runguard.runs VALUES (p_run, p_worker, runguard.clock(), p_ended, p_text)
  ON CONFLICT (id) DO UPDATE SET worker = excluded.worker, beat = excluded.beat, ended = excluded.ended, text = excluded.text;
  RETURN coalesce((SELECT version FROM runguard.documents WHERE name = 'control'), 0);
END $$;

CREATE FUNCTION runguard.claim(p_key text, p_ttl float8) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
  v_now float8 := runguard.clock();
BEGIN
  INSERT INTO runguard.claims AS c VALUES (p_key, 'pending', v_now + p_ttl)
  ON CONFLICT (key) DO UPDATE SET state = 'pending', expires = excluded.expires WHERE c.state <> 'done' AND c.expires <= v_now;
  IF FOUND THEN
    RETURN 'yes';
  END IF;
  RETURN coalesce((SELECT state FROM runguard.claims WHERE key = p_key), 'pending');
END $$;

CREATE FUNCTION runguard.finish(p_key text, p_done boolean) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  IF p_done THEN
    INSERT INTO runguard.claims VALUES (p_key, 'done', runguard.clock())
    ON CONFLICT (key) DO UPDATE SET state = 'done', expires = excluded.expires;
  ELSE
    DELETE FROM runguard.claims WHERE key = p_key AND state = 'pending';
  END IF;
END $$;

-- Drop a part of what is old, so that no purge is long; how much there was. What somebody works on stays for another time.
CREATE FUNCTION runguard.purge(p_old float8, p_most int) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
  v_keys text[];
  v_rows bigint;
  v_all bigint;
BEGIN
  v_all := runguard.expire();
  DELETE FROM runguard.holds WHERE id IN (
    SELECT id FROM runguard.holds WHERE state <> 'open' AND updated < p_old LIMIT p_most FOR UPDATE SKIP LOCKED);
  GET DIAGNOSTICS v_rows = ROW_COUNT;
  v_all := v_all + v_rows;
  DELETE FROM runguard.records WHERE seq IN (SELECT seq FROM runguard.records WHERE at < p_old LIMIT p_most FOR UPDATE SKIP LOCKED);
  GET DIAGNOSTICS v_rows = ROW_COUNT;
  v_all := v_all + v_rows;
  DELETE FROM runguard.runs WHERE id IN (SELECT id FROM runguard.runs WHERE beat < p_old LIMIT p_most FOR UPDATE SKIP LOCKED);
  GET DIAGNOSTICS v_rows = ROW_COUNT;
  v_all := v_all + v_rows;
  DELETE FROM runguard.claims WHERE key IN (SELECT key FROM runguard.claims WHERE expires < p_old LIMIT p_most FOR UPDATE SKIP LOCKED);
  GET DIAGNOSTICS v_rows = ROW_COUNT;
  v_all := v_all + v_rows;
  SELECT array_agg(key) INTO v_keys FROM (
    SELECT key FROM runguard.accounts WHERE held_usd = 0 AND held_tokens = 0 AND held_calls = 0 AND (ends < p_old OR (scope LIKE 'run%' AND updated < p_old))
    LIMIT p_most FOR UPDATE SKIP LOCKED
  ) AS past;
  DELETE FROM runguard.marks WHERE key = ANY (v_keys);
  DELETE FROM runguard.accounts WHERE key = ANY (v_keys);
  RETURN v_all + coalesce(cardinality(v_keys), 0);
END $$;

CREATE TABLE runguard.runguard_schema (version integer NOT NULL);
