package health

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
)

// Store is the file in which findings outlive the plugin.
type Store struct {
	Disk   durable.FS
	Path   string
	BootID string
}

const formatVersion = 1

type file struct {
	FormatVersion int    `json:"formatVersion"`
	Checksum      string `json:"checksum"`
	// Payload is a [state], checked as bytes.
	Payload json.RawMessage `json:"payload"`
}

type state struct {
	BootID string `json:"bootID"`
	// Driver is the load of the kernel driver that was last seen.
	Driver string  `json:"driver,omitempty"`
	Cards  []*card `json:"cards"`
	// Cleared is what an admin has asked to clear, and what was done.
	Cleared string `json:"cleared,omitempty"`
}

// Save makes what the monitor knows durable. Only one process may save at a time.
func (s Store) Save(m *Monitor) error {
	now := state{BootID: s.BootID, Driver: m.driver, Cleared: m.cleared}
	for _, c := range m.cards {
		now.Cards = append(now.Cards, c)
	}
	slices.SortFunc(now.Cards, func(a, b *card) int { return strings.Compare(string(a.Card.PCIAddress), string(b.Card.PCIAddress)) })
	payload, err := json.Marshal(now)
	if err != nil {
		return fmt.Errorf("write down the verdicts about this node's GPUs: %w", err)
	}
	raw, err := json.Marshal(file{FormatVersion: formatVersion, Checksum: checksum(payload), Payload: payload})
	if err != nil {
		return fmt.Errorf("write down the verdicts about this node's GPUs: %w", err)
	}
	return durable.Replace(s.Disk, s.Path, raw)
}

// Load adds to the monitor what was saved in this boot of the node, and leaves what the monitor knows already. When it is called again, only what came since is
// added: the rest may be over by now. A file that cannot be read is put aside and reported; then nothing is added.
func (s Store) Load(m *Monitor, now time.Time) error {
	raw, err := s.Disk.ReadFile(s.Path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	var untrusted *durable.UntrustedError
	if err != nil && !errors.As(err, &untrusted) {
		return fmt.Errorf("read the verdicts about this node's GPUs: %w", err)
	}
	var saved state
	if err == nil {
		saved, err = decode(raw)
	}
	if err != nil {
		aside := s.Path + ".unreadable"
		return errors.Join(fmt.Errorf("the verdicts about this node's GPUs in %s cannot be read; they are put aside as %s, and begin anew: %w", s.Path, aside, err),
			s.Disk.Rename(s.Path, aside))
	}
	if m.cleared == "" {
		m.cleared = saved.Cleared
	}
	if saved.BootID != s.BootID {
		return nil // the hardware has begun anew, too
	}
	m.merge(saved, now)
	return nil
}

func checksum(payload []byte) string {
	sum := sha256.Sum256(payload)
	return hex.EncodeToString(sum[:])
}

// decode reads a file, and refuses what Save does not write.
func decode(raw []byte) (state, error) {
	var f file
	if err := json.Unmarshal(raw, &f); err != nil {
		return state{}, err
	}
	if f.FormatVersion > formatVersion {
		return state{}, fmt.Errorf("format version %d is of a later version of the driver", f.FormatVersion)
	}
	if f.Checksum != checksum(f.Payload) {
		return state{}, errors.New("the checksum is wrong")
	}
	var s state
	if err := json.Unmarshal(f.Payload, &s); err != nil {
		return state{}, err
	}
	if len(s.Cards) > maxCards {
		return state{}, fmt.Errorf("%d cards are more than a node can have", len(s.Cards))
	}
	for _, c := range s.Cards {
		if c == nil {
			return state{}, errors.New("a card is empty")
		}
		if address, err := device.ParsePCIAddress(string(c.Card.PCIAddress)); err != nil || address != c.Card.PCIAddress {
			return state{}, fmt.Errorf("%q is no PCI address of a card", c.Card.PCIAddress)
		}
		for _, finding := range c.Findings {
			if finding == nil || finding.Code == "" || !slices.Contains([]Ends{EndsByLevel, EndsByReset, EndsByTime}, finding.Ends) {
				return state{}, fmt.Errorf("%s has a finding that says nothing", c.Card)
			}
		}
	}
	return s, nil
}

// merge adds what was saved. Of an XID it counts what the rules say now: they may be others than when it came.
func (m *Monitor) merge(saved state, now time.Time) {
	before := m.loaded
	m.loaded = now
	if m.driver == "" {
		m.driver = saved.Driver
	}
	for _, old := range saved.Cards {
		c := m.cards[old.Card.PCIAddress]
		if c == nil {
			c = m.card(old.Card, now)
		}
		if c == nil || c.Card.UUID != "" && old.Card.UUID != "" && c.Card.UUID != old.Card.UUID {
			continue // no room, or another card by now
		}
		c.Card.UUID = cmp.Or(c.Card.UUID, old.Card.UUID)
		if c.GPU == nil && old.GPU != nil && old.GPU.Card() == c.Card {
			c.GPU = old.GPU
		}
		if c.Recovery == device.RecoveryUnknown {
			c.Recovery, c.ResetAsked = old.Recovery, old.ResetAsked || isReset(old.Recovery)
		}
		c.Away = c.Away || old.Away && before.IsZero()
		if c.Uncorrected == nil && c.Energy == nil {
			c.Uncorrected, c.Energy = old.Uncorrected, old.Energy
		}
		for _, f := range old.Findings {
			if before.IsZero() || f.Ends != EndsByLevel && f.Last.After(before) {
				m.remember(c, *f, now)
			}
		}
	}
	m.version++
}

func (m *Monitor) remember(c *card, f Finding, now time.Time) {
	for _, at := range []*time.Time{&f.First, &f.Last, &f.Since} {
		if at.After(now) {
			*at = now
		}
	}
	if f.XID != 0 {
		meaning := m.rules.XID(f.XID)
		if meaning.Weight == Ignored {
			return
		}
		state, ends := meaning.verdict()
		if state != f.State {
			f.Since = f.First
		}
		f.State, f.Ends, f.Action = state, ends, meaning.Action
	}
	if f.Last.After(c.asked) {
		c.asked = f.Last // whatever an answer shows now came after it
	}
	if known := c.find(f.key()); known != nil {
		known.Count = max(known.Count, f.Count)
		if f.First.Before(known.First) {
			known.First = f.First
		}
		if f.Since.Before(known.Since) && f.State == known.State {
			known.Since = f.Since
		}
		return
	}
	if m.admit(c, &f, now) {
		c.Findings = append(c.Findings, &f)
	}
}
