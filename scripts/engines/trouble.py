"""The troubles of scripts/chaos: a seed draws which come, to whom, when, and for how long."""

import signal
from dataclasses import replace

from proxy import Weather

LOST_OF_REPLAYS_MAX = 0.05


class Trouble:
    """Begins one trouble after the other; each ends by itself at its time."""

    def __init__(self, fleet, draws):
        self.fleet, self.draws = fleet, draws
        self.ends = []  # (when, what ends it)
        self.next_s, self.counts = 1.0, {}
        self.daemon_is_down = False
        self.busy = set()  # workers whose process is down or stopped

    def tick(self, now_s):
        """Does what is due."""
        due = [end for end in self.ends if end[0] <= now_s]
        self.ends = [end for end in self.ends if end[0] > now_s]
        for _, end in due:
            end()
        if now_s >= self.next_s:
            self.begin(now_s)
            self.next_s = now_s + self.draws.uniform(0.2, 1.2)

    def begin(self, now_s):
        draws = self.draws
        engine, for_s = draws.choice(self.fleet.engines), draws.uniform(0.1, 3.0)
        name = draws.choices(["kill", "pause", "cut", "weather", "closed", "daemon"], [3, 3, 4, 6, 2, 1])[0]
        chosen = [one for one in engine.proxies if draws.random() < 0.7] or engine.proxies
        weather = Weather(lost=draws.choice([0, 0.05, 0.1, 0.4]), repeated=draws.choice([0, 0.05, 0.2]),
                          delay_s_max=draws.choice([0, 0, 0.02, 0.2]))
        how = draws.choice([signal.SIGTERM, signal.SIGKILL])
        if name in ("kill", "pause") and engine.worker in self.busy:
            return
        if name == "daemon":
            if self.daemon_is_down:
                return
            name = f"daemon {how.name}"
        self.counts[name] = self.counts.get(name, 0) + 1
        end = self.act(name, engine, chosen, weather, how)
        if end:
            self.ends.append((now_s + for_s, end))

    def act(self, name, engine, chosen, weather, how):
        """Begins it, and returns what ends it."""
        if name == "cut":
            for one in chosen:
                one.cut()
            return None
        if name in ("weather", "closed"):
            for one in chosen:
                one.weather = Weather(is_closed=True) if name == "closed" else self.of(one, engine, weather)
                if name == "closed":
                    one.cut()
            return lambda: [setattr(one, "weather", Weather()) for one in chosen]
        if name in ("kill", "pause"):
            self.busy.add(engine.worker)
            (engine.kill if name == "kill" else engine.pause)()
            again = engine.start if name == "kill" else engine.resume
            return lambda: (self.busy.discard(engine.worker), again())
        self.daemon_is_down = True
        self.fleet.daemon.stop(how)
        return self.restart_daemon

    @staticmethod
    def of(one, engine, weather):
        """A replay that loses much each time is given up after a few tries, rightly; what is exact then hangs on luck."""
        return weather if one is engine.proxies[0] else replace(weather, lost=min(weather.lost, LOST_OF_REPLAYS_MAX))

    def restart_daemon(self):
        self.daemon_is_down = False
        self.fleet.daemon.start()

    def finish(self):
        """Ends all that has begun."""
        for _, end in self.ends:
            end()
        self.ends = []
