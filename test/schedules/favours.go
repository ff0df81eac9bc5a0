package schedules

// cell is a place in the table of steps by faults.
type cell struct {
	step  step
	fault fault
}

// favour is what a story wants to meet. The seed alone says what that is, so that a story is the same whatever was told before it; stories of as many seeds,
// one after the other, favour each cell as often.
type favour struct {
	cell
	// often is how often the fault is met where it can be, in percent.
	often float64
	// kinds are the only kinds of claims, where the step comes with them; all, if there are none.
	kinds []string
	// few says that there are two claims alone, which come and go the more often.
	few bool
	// rot is how often a file of the plugin's state is spoilt, in percent of what happens, and rotten of which room; of any, if there is none.
	rot    float64
	rotten string
	// gone is how often a claim is freed behind the kubelet's back and looked for, in percent of what happens.
	gone float64
	// before is what has to go wrong for the step to come at all.
	before cell
}

var (
	// wholesAndParts are claims that turn a GPU's MIG mode on and off.
	wholesAndParts = []string{"whole", "partition"}
	sharers        = []string{"share", "share, shorter", "fraction", "fraction of a partition", "whole, time slices", "whole, MPS"}
	daemonized     = []string{"whole, MPS", "two wholes, MPS", "partition, MPS", "fraction", "fraction of a partition"}
)

// favours are what stories do for steps that come seldom.
var favours = map[step]favour{
	"record: set aside":         {often: 60, rot: 25, rotten: "record"},
	"holder: set aside":         {often: 60, rot: 40, rotten: "holder", kinds: sharers},
	"quarantine: sync":          {often: 60, rot: 25, rotten: "record"},
	"record: remove unfinished": {often: 40, before: cell{"record: create", fails}},
	"holder: remove unfinished": {often: 40, before: cell{"holder: create", fails}, kinds: sharers},
	"mark: remove unfinished":   {often: 60, before: cell{"mark: create", fails}, kinds: wholesAndParts, few: true},
	"mark: remove":              {often: 60, kinds: wholesAndParts, few: true},
	modeOff:                     {often: 90, kinds: wholesAndParts, few: true},
	modeOn:                      {often: 40, kinds: wholesAndParts, few: true},
	startDaemon:                 {often: 25, kinds: daemonized},
	stopDaemon:                  {often: 25, kinds: daemonized},
	"state: make directory":     {often: 1},
	"state: sync":               {often: 1},
	"record: list":              {often: 1},
	foundGone:                   {often: 80, gone: 60},
}

// rarest are the steps that one in three stories is told for. A mode is turned off least: only where a whole GPU is wanted after parts of it.
var rarest = []step{modeOff, modeOff, modeOff, modeOff, modeOff, "mark: remove unfinished", "holder: set aside", "record: set aside", "quarantine: sync"}

// cells are all that can be met at the steps.
func cells(steps []step) []cell {
	var all []cell
	for _, s := range steps {
		for _, f := range s.can() {
			all = append(all, cell{s, f})
		}
	}
	return all
}

func favourOf(seed uint64) favour {
	var steps []step
	for _, c := range classes {
		steps = append(steps, c.step)
	}
	// Of each three seeds two are counted for all steps and one for the rarest, so that either go through their cells one after the other.
	number := seed - seed/3
	if seed%3 == 0 {
		number = seed / 3
		steps = rarest
	}
	among := cells(steps)
	c := among[number%uint64(len(among))]
	f, rare := favours[c.step]
	if !rare {
		f.often = 25
	}
	f.cell = c
	return f
}

// favoured is the fault that the story wants to meet at the step.
func (s *schedule) favoured(of step) fault {
	switch f := s.favour; {
	case of == f.step && s.chance(f.often):
		return f.fault
	case of == f.before.step && s.chance(f.often):
		return f.before.fault
	}
	return none
}
