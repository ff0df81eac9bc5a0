package health

import (
	"cmp"
	"reflect"
	"slices"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

const (
	// maxCards is more than a node can have.
	maxCards = 256
	// maxChanges bounds what waits to be told; of one finding only the latest does.
	maxChanges = 256
	// maxCounted bounds the kinds of events that are counted apart.
	maxCounted = 1024
)

// Options are what an admin may say. The zero value is good.
type Options struct {
	Rules Rules
	// Quiet is how long nothing may have come before what ends by time is over: DefaultQuiet if 0.
	Quiet time.Duration
}

// Monitor judges what it is told. It is for one goroutine; readers are given a [View].
type Monitor struct {
	rules Rules
	quiet time.Duration
	cards map[device.PCIAddress]*card
	// forgotten are places of cards that were taken out, and that who listens goes on to call lost.
	forgotten map[device.PCIAddress]bool
	// driver is the load of the kernel driver that was last seen.
	driver string
	// cleared is what an admin asked for last; it was done.
	cleared string
	// silent is since when nobody listens, and why; zero while somebody does.
	silent   time.Time
	silence  string
	released bool
	// deaf says why events are not listened to.
	deaf string

	now time.Time // when it was last told anything
	// aged says that what was saved is older than what is known, renewed when that last became a new version.
	aged    bool
	renewed time.Time
	// loaded is when what was saved was last read.
	loaded  time.Time
	version uint64
	// aging counts how often what was saved had become too old.
	aging   uint64
	changes []Change
	counts  map[Counted]uint64
}

// Counted is a kind of event of a card.
type Counted struct {
	Card device.PCIAddress
	Code string
}

// New makes a monitor that begins to listen now. Every card is healthy until something else is said, and unknown if nothing is said for long.
func New(o Options, now time.Time) *Monitor {
	return &Monitor{
		rules: o.Rules, quiet: cmp.Or(o.Quiet, DefaultQuiet), cards: map[device.PCIAddress]*card{}, forgotten: map[device.PCIAddress]bool{}, counts: map[Counted]uint64{},
		silent: now, silence: "it has not begun", now: now, renewed: now,
	}
}

// Expect says which cards there are, and what they are. One that was not known is waited for from now on.
func (m *Monitor) Expect(gpus []device.GPU, now time.Time) {
	m.now = now
	for _, g := range gpus {
		if c := m.card(g.Card(), now); c != nil && (c.GPU == nil || !reflect.DeepEqual(*c.GPU, g)) {
			c.GPU = &g // changes no verdict
		}
	}
}

// Forget drops a card that is not there any more and that nobody asks for, until there is another one at its place.
func (m *Monitor) Forget(address device.PCIAddress) {
	if _, known := m.cards[address]; known {
		delete(m.cards, address)
		if len(m.forgotten) >= maxCards {
			clear(m.forgotten)
		}
		m.forgotten[address] = true
		m.version++
	}
}

// Apply judges one signal.
func (m *Monitor) Apply(s device.Signal, now time.Time) {
	m.now = now
	switch {
	case s.Event != nil:
		if c := m.card(s.Event.Card, now); c != nil {
			m.event(c, *s.Event, now)
		}
	case s.Condition != nil:
		a, reach := s.Condition.Card.PCIAddress, s.Condition.Reach
		if m.cards[a] == nil && (reach == device.ReachNotOurs || reach != device.ReachOK && m.forgotten[a]) {
			return
		}
		if c := m.card(s.Condition.Card, now); c != nil {
			m.condition(c, *s.Condition, now)
		}
	case s.Watcher != nil:
		m.watcher(*s.Watcher, now)
	}
}

// Tick lets time pass. It is to be called about every second, but while it is [Monitor.Calm].
func (m *Monitor) Tick(now time.Time) {
	m.now = now
	for _, c := range m.cards {
		m.patience(c, now)
	}
	if m.aged && now.Sub(m.renewed) >= renewAfter {
		m.aged, m.renewed = false, now
		m.aging++
	}
}

// card finds the card, and forgets another one that was at its place. It is nil where there is no room for any more.
func (m *Monitor) card(who device.Card, now time.Time) *card {
	c := m.cards[who.PCIAddress]
	if c != nil && who.UUID != "" && c.Card.UUID != "" && c.Card.UUID != who.UUID {
		m.drop(c, func(*Finding) bool { return true }, "another card is at its place: "+who.UUID)
		delete(m.cards, who.PCIAddress)
		m.version++
		c = nil
	}
	if c == nil {
		if len(m.cards) >= maxCards {
			return nil
		}
		c = &card{Card: who, heard: now}
		m.cards[who.PCIAddress] = c
		delete(m.forgotten, who.PCIAddress)
		m.version++
	}
	if c.Card.UUID == "" {
		c.Card.UUID = who.UUID
	}
	return c
}

// watcher judges how well is listened.
func (m *Monitor) watcher(s device.WatcherState, now time.Time) {
	at := s.At
	if at.IsZero() || at.After(now) {
		at = now
	}
	if s.Driver != "" && s.Driver != m.driver {
		if m.driver != "" {
			for _, c := range m.cards {
				c.Uncorrected, c.Energy = nil, nil
				c.Recovery = device.RecoveryUnknown
				m.wasReset(c, at, "the driver was loaded again")
			}
		}
		m.driver = s.Driver
		m.version++
	}
	m.deaf = ""
	if !s.Events {
		m.deaf = cmp.Or(clean(s.Error), "unknown")
	}
	if m.released != s.Released {
		m.released = s.Released
		m.version++
	}
	switch {
	case s.Up:
		if !m.silent.IsZero() {
			for _, c := range m.cards {
				c.heard = now
			}
		}
		m.silent, m.silence = time.Time{}, ""
	case m.silent.IsZero():
		m.silent, m.silence = now, cmp.Or(clean(s.Error), "unknown")
	default:
		m.silence = cmp.Or(clean(s.Error), m.silence)
	}
	m.Tick(now)
}

// Deaf says why events are not listened to, empty while they are.
func (m *Monitor) Deaf() string { return m.deaf }

// Version is another number whenever a verdict may be another one.
func (m *Monitor) Version() uint64 { return m.version }

// Edition is another number whenever something is to be saved: with another [Monitor.Version], and when what no verdict depends on now has been another for a
// while.
func (m *Monitor) Edition() uint64 { return m.version + m.aging }

// changed remembers what is to be told. Of one finding the latest counts; one that came and went before anybody was told is told as both.
func (m *Monitor) changed(change Change) {
	m.version++
	same := func(c Change) bool {
		return c.Card == change.Card && c.Over == change.Over && c.Finding.Code == change.Finding.Code && c.Finding.Part.name() == change.Finding.Part.name()
	}
	m.changes = slices.DeleteFunc(m.changes, same)
	if len(m.changes) >= maxChanges {
		m.changes = m.changes[1:]
	}
	m.changes = append(m.changes, change)
}

// Changes takes what came and went since it was last called, in order.
func (m *Monitor) Changes() []Change {
	taken := m.changes
	m.changes = nil
	return taken
}

// count counts events for the metrics.
func (m *Monitor) count(c *card, code string, n int) {
	key := Counted{c.Card.PCIAddress, code}
	if _, known := m.counts[key]; !known && len(m.counts) >= maxCounted {
		key.Code = "other"
	}
	m.counts[key] += uint64(max(n, 1))
}

// Counts takes how many events came since it was last called.
func (m *Monitor) Counts() map[Counted]uint64 {
	taken := m.counts
	m.counts = map[Counted]uint64{}
	return taken
}
