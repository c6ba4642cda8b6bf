import asyncio, sys, os, json
from pathlib import Path
import pytest
sys.path[:0]=["/work/main/tests/rl_bridge/rollout","/work/main/tests/rl_bridge/gateway","/work/main/tests/rl_bridge/agents"]
from serving import serving
from agent_fixtures import *
from solving import *
from examples.grpo_tools.world import app
from worker_fixtures import trajectories, playing
from rl_bridge.agents.player import AgentPlayer
import rl_bridge.gateway.app as gapp

@pytest.mark.timeout(200)
async def test_try(tmp_path, monkeypatch):
    name=os.environ["AGENT"]; path=os.environ["PROGRAM"]
    orig=gapp._read_body
    async def logged(request):
        body=await orig(request)
        with open(f"/tmp/agents/log-{name}.jsonl","a") as f: f.write(json.dumps({"path":str(request.url.path),"headers":dict(request.headers),"body":body})+"\n")
        return body
    monkeypatch.setattr(gapp,"_read_body",logged)
    open(f"/tmp/agents/log-{name}.jsonl","w").close()
    tok=CharacterTokenizer(); engine=SolvingEngine(tok)
    async with serving(app) as address:
        config = Config.model_validate({"env": {"app": "a:b"}, "rollout": {"task":"a:b","agent": {"preset":name,"program":path,"timeout_s":90}}})
        agents = AgentPlayer(config, QuestionTask(config, tmp_path))
        async with playing([f"http://{address}"], QuestionTask, str, tokenizer=chat_tokenizer_of(tok, monkeypatch), engine=engine, max_new_tokens=4000, max_length=2_000_000, max_attempts=1) as play:
            play.worker._agents=agents
            import time; t=time.time()
            r=await play([int(os.environ.get("SEED","1"))], difficulty="easy", max_calls=6)
            print("took", time.time()-t)
            for o in r.outcomes:
                print(type(o).__name__, {k:getattr(o,k) for k in ("ending","reward","tool_calls","reason") if hasattr(o,k)}, len(getattr(o,"turns",())))
            print([len(a) for a in engine.asked]); from rl_bridge.tokens.conversation import training_rows; print("rows", [[(len(x.tokens), sum(x.loss_mask)) for x in training_rows(o,advantage=1.0,index=0)] for o in r.outcomes if hasattr(o,"turns")], "sampled", sum(len(c.tokens) for c in engine.sampled)); print(engine.asked[-1][:3000])
        await agents.close()
    for p in sorted((tmp_path/"agents").rglob("*.log")): print(p.read_text()[-3000:])
