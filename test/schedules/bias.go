package schedules

// cell is one entry of the coverage table: a fault point, and a fault that is injected there.
type cell struct {
	point faultPoint
	fault fault
}

// bias makes a schedule inject one fault at one fault point more often. The seed alone selects the
// bias, so a schedule does not depend on earlier ones. Consecutive seeds cover every cell equally.
type bias struct {
	cell
	// often is the probability, in percent, of the fault when the schedule reaches the fault point.
	often float64
	// claimKinds are the only kinds of claims that the schedule creates, because only these reach the
	// fault point, or because they share GPUs. Empty means all kinds.
	claimKinds []string
	// fewClaims makes the schedule use two claims instead of four. Each of them is then prepared and
	// unprepared more often.
	fewClaims bool
	// corrupt is the percentage of events that damage a file of the plugin's state. corruptDir names
	// the only state directory whose files they damage. If it is empty, they damage files in any.
	corrupt    float64
	corruptDir string
	// gone is the percentage of events that deallocate a claim without the kubelet's knowledge. The
	// plugin's garbage collection must then unprepare the claim.
	gone float64
	// together is the percentage of events that are a call for every claim, to two instances of the
	// plugin. So the instances compete for the same GPUs.
	together float64
	// before is a fault that the schedule injects as often at an earlier fault point, because only
	// after it the plugin reaches the biased one.
	before cell
}

var (
	// modeChangers are the kinds of claims whose Prepare switches a GPU's MIG mode.
	modeChangers = []string{"whole", "partition"}
	sharers      = []string{
		"share", "share, shorter", "fraction", "fraction of a partition", "whole, time slices", "whole, MPS",
	}
	passedThrough = []string{"passthrough", "passthrough and partition", "whole"}
	daemonUsers   = []string{"whole, MPS", "two whole GPUs, MPS", "partition, MPS", "fraction", "fraction of a partition"}
)

// biases has, for each rarely reached fault point, settings with which a schedule reaches it more
// often.
var biases = map[faultPoint]bias{
	"record: set aside":         {often: 60, corrupt: 25, corruptDir: "record"},
	"holder: set aside":         {often: 60, corrupt: 40, corruptDir: "holder", claimKinds: sharers},
	"quarantine: sync":          {often: 60, corrupt: 25, corruptDir: "record"},
	"record: remove unfinished": {often: 40, before: cell{"record: create", fails}},
	// An unfinished holder file outlives its claim only if the claim's record is damaged as well.
	"holder: remove unfinished": {often: 60, before: cell{"holder: create", fails}, corrupt: 40, corruptDir: "record", claimKinds: sharers},
	"mark: remove unfinished":   {often: 60, before: cell{"mark: create", fails}, claimKinds: modeChangers, fewClaims: true},
	"mark: remove":              {often: 60, claimKinds: modeChangers, fewClaims: true},
	modeOff:                     {often: 90, claimKinds: modeChangers, fewClaims: true},
	modeOn:                      {often: 40, claimKinds: modeChangers, fewClaims: true},
	startDaemon:                 {often: 25, claimKinds: daemonUsers},
	stopDaemon:                  {often: 25, claimKinds: daemonUsers},
	"state: make directory":     {often: 1},
	"state: sync":               {often: 1},
	"record: list":              {often: 1},
	foundGone:                   {often: 80, gone: 60},
	setOverride:                 {often: 25, claimKinds: passedThrough},
	unbindDriver:                {often: 25, claimKinds: passedThrough},
	probeDrivers:                {often: 25, claimKinds: passedThrough},
}

// rarest lists fault points that random schedules seldom reach. Every third schedule aims at one of
// them. One that is listed several times is chosen more often: MIG mode is disabled only when a
// claim for a whole GPU follows claims for partitions of that GPU.
var rarest = []faultPoint{
	modeOff, modeOff, modeOff, modeOff, modeOff,
	"mark: remove unfinished", "holder: set aside", "record: set aside", "quarantine: sync",
}

// cells returns every possible combination of one of the fault points and a fault.
func cells(points []faultPoint) []cell {
	var all []cell
	for _, p := range points {
		for _, f := range p.possible() {
			all = append(all, cell{p, f})
		}
	}
	return all
}

func biasOf(seed uint64) bias {
	var points []faultPoint
	for _, c := range classes {
		points = append(points, c.point)
	}
	// Two seeds in three iterate over the cells of all fault points, the third over those of the
	// rarest.
	number := seed - seed/3
	if seed%3 == 0 {
		number = seed / 3
		points = rarest
	}
	among := cells(points)
	c := among[number%uint64(len(among))]
	f, rare := biases[c.point]
	if !rare {
		f.often = 25
	}
	f.cell = c
	if c.fault == secondInstance {
		f.together = 60
		if len(f.claimKinds) == 0 {
			f.claimKinds = sharers
		}
	}
	return f
}

// biasedFault chooses the fault to inject at a fault point. The result is a fault only if the
// schedule's bias names that fault point and the dice decide so, and none otherwise.
func (s *schedule) biasedFault(of faultPoint) fault {
	switch f := s.bias; {
	case of == f.point && s.chance(f.often):
		return f.fault
	case of == f.before.point && s.chance(f.often):
		return f.before.fault
	}
	return none
}
