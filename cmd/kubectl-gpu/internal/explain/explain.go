package explain

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/cmd/kubectl-gpu/internal/fleet"
)

// State says where a Pod or claim is.
type State string

const (
	// Waits means that the claims fit on no node now.
	Waits State = "waits"
	// Fits means that the claims fit on a node, but are not allocated yet.
	Fits State = "fits"
	// Blocked means that a reason keeps the scheduler from trying any node.
	Blocked State = "blocked"
	// Allocated means that the claim has devices.
	Allocated State = "allocated"
	// Scheduled means that the Pod has a node, Ended that it needs its claims no longer.
	Scheduled State = "scheduled"
	Ended     State = "ended"
	// Unused means that no Pod uses the claim, so that nothing allocates it.
	Unused State = "unused"
	// NoDevices means that the Pod uses no claims.
	NoDevices State = "no-claims"
)

// Report is the answer about one Pod or claim.
type Report struct {
	Subject string `json:"subject"`
	State   State  `json:"state"`
	// Summary is one sentence.
	Summary string `json:"summary"`
	// Reasons hold for all nodes, those in Nodes for one.
	Reasons []Reason `json:"reasons,omitempty"`
	Nodes   []Node   `json:"nodes,omitempty"`
	// Remedies are alternatives, the smallest first.
	Remedies []Remedy   `json:"remedies,omitempty"`
	Claims   []Claim    `json:"claims,omitempty"`
	Notes    []string   `json:"notes,omitempty"`
	Asked    []AskedFor `json:"asked,omitempty"`
	question question   `json:"-"`
}

// AskedFor is one request of a claim that is not allocated, in words.
type AskedFor struct {
	Claim    string `json:"claim"`
	Request  string `json:"request"`
	Sentence string `json:"sentence"`
}

// Node is the allocator's verdict on one node, and the reasons.
type Node struct {
	Name    string   `json:"name"`
	Fits    bool     `json:"fits"`
	Reasons []Reason `json:"reasons,omitempty"`

	node *corev1.Node
	// opens are the changes without which no claim would fit, because the Pod may not run here. closed
	// is true if no change could open the node.
	opens  []Change
	closed bool
	asked  []asked
	// cost is about how many changes the node needs.
	cost int
}

// asked is one request, with what each of the node's devices is to it.
type asked struct {
	claim   *resourceapi.ResourceClaim
	request request
	fates   []fate
	need    int
}

// Reason is one cause why the claims do not fit.
type Reason struct {
	Code     string `json:"code"`
	Sentence string `json:"sentence"`
	// Request is the request that the reason is about. It is empty if the reason is about all.
	Request string `json:"request,omitempty"`
	// Devices is how many devices the reason excludes.
	Devices  int      `json:"devices,omitempty"`
	Claims   []string `json:"claims,omitempty"`
	Selector string   `json:"selector,omitempty"`
	Taint    string   `json:"taint,omitempty"`
	Counters []string `json:"counters,omitempty"`
}

// Remedy is a set of changes that makes the claims fit on a node. None of them can be left out.
type Remedy struct {
	Node    string   `json:"node"`
	Changes []Change `json:"changes"`
}

func key(c *resourceapi.ResourceClaim) string { return fleet.Key(c) }

// Pod explains a Pod.
func (e *Explainer) Pod(ctx context.Context, namespace, name string) (*Report, error) {
	if err := e.s.Need(fleet.Pods, fleet.Classes); err != nil {
		return nil, err
	}
	p := e.s.Pod(namespace, name)
	if p == nil {
		return nil, fmt.Errorf("pod %s/%s does not exist: name its namespace with -n", namespace, name)
	}
	q, blocked := e.claimsOf(p)
	r := &Report{Subject: "Pod " + fleet.Key(p), question: q}
	for _, c := range q.allocated {
		r.Claims = append(r.Claims, e.claim(c))
	}
	switch {
	case fleet.Ended(p):
		r.State, r.Summary = Ended, sayEnded(r.Subject, string(p.Status.Phase))
	case len(q.open)+len(q.allocated)+len(blocked) == 0:
		r.State, r.Summary = NoDevices, sayNoClaims(r.Subject)
	case p.Spec.NodeName != "":
		e.scheduled(r, p, q)
	case len(blocked) > 0:
		r.State, r.Reasons, r.Summary = Blocked, blocked, sayBlocked(r.Subject, blocked)
	default:
		e.search(ctx, r, q)
	}
	return r, nil
}

// scheduled fills in the report of a Pod that has a node.
func (e *Explainer) scheduled(r *Report, p *corev1.Pod, q question) {
	r.State, r.Summary = Scheduled, sayScheduled(r.Subject, p.Spec.NodeName, string(p.Status.Phase))
	for _, c := range q.open {
		r.Reasons = append(r.Reasons, Reason{Code: CodeBypassed, Claims: []string{key(c)}, Sentence: sayBypassed(c)})
	}
	if p.Status.Phase == corev1.PodPending {
		for _, c := range q.allocated {
			if !reservedFor(c, p) {
				r.Reasons = append(r.Reasons, Reason{Code: CodeNotReserved, Claims: []string{key(c)}, Sentence: sayNotReserved(c)})
			}
		}
	}
}

// Claim explains a claim. A claim that waits is explained with the Pod that waits for it.
func (e *Explainer) Claim(ctx context.Context, namespace, name string) (*Report, error) {
	c := e.s.Claim(namespace, name)
	if c == nil {
		return nil, fmt.Errorf("claim %s/%s does not exist: name its namespace with -n", namespace, name)
	}
	r := &Report{Subject: "claim " + key(c)}
	users := e.s.PodsOf(c)
	if c.Status.Allocation != nil {
		r.State, r.Claims = Allocated, []Claim{e.claim(c)}
		r.Summary = sayAllocated(c, names(users))
		return r, nil
	}
	if c.DeletionTimestamp != nil {
		r.State, r.Reasons = Blocked, []Reason{{Code: CodeClaimDeleted, Claims: []string{key(c)}, Sentence: sayClaimDeleted(c)}}
		r.Summary = sayBlocked(r.Subject, r.Reasons)
		return r, nil
	}
	if err := e.s.Need(fleet.Pods, fleet.Classes); err != nil {
		return nil, err
	}
	q := question{open: []*resourceapi.ResourceClaim{c}}
	blocked := e.blockedClaims(q.open)
	if len(users) > 0 {
		q, blocked = e.claimsOf(users[0])
		r.Notes = append(r.Notes, sayWithPod(names(users)))
	}
	if len(blocked) > 0 {
		r.State, r.Reasons, r.Summary = Blocked, blocked, sayBlocked(r.Subject, blocked)
		return r, nil
	}
	e.search(ctx, r, q)
	if len(users) == 0 && r.State == Fits {
		r.State, r.Summary, r.Remedies = Unused, sayUnused(c), nil
	} else if len(users) == 0 {
		r.Notes = append(r.Notes, sayUnused(c))
	}
	return r, nil
}

func names(pods []*corev1.Pod) []string {
	var all []string
	for _, p := range pods {
		all = append(all, fleet.Key(p))
	}
	return all
}

// search asks the allocator about each node and looks for remedies if no node fits.
func (e *Explainer) search(ctx context.Context, r *Report, q question) {
	r.question = q
	base := scenario{claims: q.open}
	for _, c := range q.open {
		requests, _ := requestsOf(c)
		for _, one := range requests {
			r.Asked = append(r.Asked, AskedFor{key(c), one.name(), sayAsked(one)})
		}
	}
	nodes := make([]Node, len(e.s.Nodes))
	group := errgroup.Group{}
	group.SetLimit(runtime.GOMAXPROCS(0))
	for i, node := range e.s.Nodes {
		group.Go(func() error {
			n := e.node(ctx, q, node, base)
			n.cost = len(n.opens) + estimate(&n)
			n.asked = nil // the devices of all nodes together would need much memory
			nodes[i] = n
			return nil
		})
	}
	_ = group.Wait() // no function returns an error
	r.Nodes = nodes
	var fitting []string
	var fatal []Reason
	for _, n := range nodes {
		if n.Fits {
			fitting = append(fitting, n.Name)
		}
		if reason, ok := n.fatal(); ok {
			fatal = append(fatal, reason)
		}
	}
	switch {
	case len(nodes) == 0:
		r.State, r.Summary = Waits, sayNoNodes(r.Subject)
		return
	case len(fatal) > 0:
		// The scheduler ends its attempt for all nodes if its allocator returns an error for one of them.
		// A failing selector is such an error, and a constraint that a claim for all devices cannot meet.
		r.State, r.Reasons = Blocked, fatal[:1]
		r.Summary = sayBlocked(r.Subject, r.Reasons)
	case len(fitting) > 0:
		r.State, r.Summary = Fits, sayFits(r.Subject, fitting)
		return
	default:
		r.State, r.Summary = Waits, sayWaits(r.Subject, nodes)
	}
	r.Remedies = e.remedies(ctx, q, nodes, base)
	if len(fatal) > 0 {
		r.Remedies = slices.DeleteFunc(r.Remedies, func(remedy Remedy) bool { return e.fails(ctx, q, base.with(remedy.Changes...)) })
	}
}

// fatal returns the reason why the allocator returns an error for the node, which ends the
// scheduler's attempt for all nodes.
func (n Node) fatal() (Reason, bool) {
	if len(n.opens) > 0 || n.closed {
		return Reason{}, false // the scheduler does not ask its allocator
	}
	// The first one says best what is wrong.
	for _, code := range []string{CodeSelectorError, CodeTooMany, CodeError} {
		failed := code == CodeSelectorError || slices.ContainsFunc(n.Reasons, func(r Reason) bool { return r.Code == CodeError })
		if i := slices.IndexFunc(n.Reasons, func(r Reason) bool { return r.Code == code }); i >= 0 && failed {
			return n.Reasons[i], true
		}
	}
	return Reason{}, false
}

// node returns the allocator's verdict on one node, and the reasons if the claims do not fit.
func (e *Explainer) node(ctx context.Context, q question, node *corev1.Node, base scenario) Node {
	n := Node{Name: node.Name, node: node, Reasons: e.nodeReasons(q, node)}
	for _, reason := range n.Reasons {
		if opens[reason.Code] {
			n.opens = append(n.opens, Change{Kind: OpenNode, NodeReason: reason.Code, Sentence: sayOpen(reason.Code, node.Name)})
		} else {
			n.closed = true
		}
	}
	base.claims = withoutDevicePlugin(base.claims, node)
	if len(base.claims) == 0 {
		n.Fits = len(n.Reasons) == 0
		return n
	}
	pools := e.poolsOn(node)
	for _, c := range base.claims {
		requests, _ := requestsOf(c)
		for _, r := range requests {
			a := asked{claim: c, request: r, fates: e.fates(ctx, pools, r)}
			a.need = needed(r, a.fates)
			n.asked = append(n.asked, a)
		}
	}
	candidates := e.candidates(node, n.asked)
	results, err := e.allocateOf(ctx, node, candidates, base)
	if err == nil && len(results) == len(base.claims) {
		n.Fits = len(n.Reasons) == 0
		return n
	}
	if len(pools) == 0 {
		n.Reasons = append(n.Reasons, Reason{Code: CodeNoSlices, Sentence: sayNoSlices()})
		n.closed = true
		return n
	}
	for _, p := range pools {
		if p.have < p.want {
			n.Reasons = append(n.Reasons, Reason{Code: CodeIncomplete, Sentence: sayIncomplete(p.id, p.have, p.want)})
		}
	}
	for _, a := range n.asked {
		n.Reasons = append(n.Reasons, requestReasons(a)...)
	}
	n.Reasons = append(n.Reasons, e.claimReasons(ctx, candidates, base, n)...)
	if err != nil && !slices.ContainsFunc(n.Reasons, func(r Reason) bool { return r.Code == CodeSelectorError }) {
		n.Reasons = append(n.Reasons, errorReason(err))
	}
	return n
}

func errorReason(err error) Reason {
	if errors.Is(err, errGaveUp) {
		return Reason{Code: CodeGaveUp, Sentence: sayGaveUp()}
	}
	return Reason{Code: CodeError, Sentence: err.Error()}
}

// needed returns how many devices the request needs.
func needed(r request, fates []fate) int {
	if f := r.fields(); *f.mode != resourceapi.DeviceAllocationModeAll {
		return int(min(*f.count, resourceapi.AllocationResultsMaxSize+1))
	}
	n := 0
	for _, f := range fates {
		if f.matches() {
			n++
		}
	}
	return max(n, 1)
}

// claimReasons returns the reasons that are about more than one device. Dropping a constraint shows
// whether it is a reason.
func (e *Explainer) claimReasons(ctx context.Context, candidates []*resourceapi.ResourceSlice, base scenario, n Node) []Reason {
	var all []Reason
	enough := true
	for _, a := range n.asked {
		free := 0
		for _, f := range a.fates {
			if f.free() {
				free++
			}
		}
		// Of a prioritized list one alternative is enough, and each has its own reasons.
		enough = enough && (free >= a.need || a.request.sub != nil)
	}
	if !enough {
		return nil
	}
	for _, c := range base.claims {
		for i, constraint := range c.Spec.Devices.Constraints {
			drop := Change{Kind: DropConstraint, Claim: key(c), Constraint: i}
			if results, err := e.allocateOf(ctx, n.node, candidates, base.with(drop)); err == nil && len(results) == len(base.claims) {
				all = append(all, Reason{Code: CodeConstraint, Claims: []string{key(c)}, Sentence: sayConstraint(constraint, groups(n, c, constraint))})
			}
		}
	}
	alternatives := slices.ContainsFunc(n.asked, func(a asked) bool { return a.request.sub != nil })
	if len(all) == 0 && (len(n.Reasons) == 0 || !alternatives) {
		all = append(all, Reason{Code: CodeTogether, Sentence: sayTogether()})
	}
	return all
}

// groups counts the free devices of the constraint's requests by the value of its attribute.
func groups(n Node, c *resourceapi.ResourceClaim, constraint resourceapi.DeviceConstraint) map[string]int {
	count := map[string]int{}
	name := constraint.MatchAttribute
	if name == nil {
		name = constraint.DistinctAttribute
	}
	seen := map[*resourceapi.Device]bool{}
	for _, a := range n.asked {
		if name == nil || a.claim != c ||
			len(constraint.Requests) > 0 && !slices.Contains(constraint.Requests, strings.Split(a.request.name(), "/")[0]) {
			continue
		}
		for _, f := range a.fates {
			if !f.free() || seen[f.device] {
				continue
			}
			seen[f.device] = true
			value, has := attribute(f.pool.id, f.device, *name)
			if !has {
				value = "(none)"
			}
			count[value]++
		}
	}
	return count
}

// requestReasons returns why the node has too few devices for one request. It returns none if the
// node has enough.
func requestReasons(a asked) []Reason {
	var all []Reason
	name := a.request.name()
	add := func(r Reason) {
		r.Request = name
		all = append(all, r)
	}
	total, matching, free := len(a.fates), 0, 0
	for _, f := range a.fates {
		if f.failure != nil {
			add(Reason{Code: CodeSelectorError, Selector: f.selector, Sentence: saySelectorError(f)})
			return all
		}
		if f.matches() {
			matching++
		}
		if f.free() {
			free++
		}
	}
	if free >= a.need && matching > 0 {
		return nil
	}
	if matching < a.need || matching == 0 {
		for _, g := range group(a.fates, func(f fate) (string, bool) { return f.class + "\x00" + f.selector, !f.matches() }) {
			add(Reason{Code: CodeSelector, Devices: len(g), Selector: g[0].selector, Sentence: saySelector(len(g), total, g[0])})
		}
	}
	if matching == 0 {
		return all
	}
	for _, g := range group(a.fates, func(f fate) (string, bool) { return "", f.matches() && len(f.holders) > 0 }) {
		claims := claimsIn(g, func(f fate) []*resourceapi.ResourceClaim { return f.holders })
		add(Reason{Code: CodeTaken, Devices: len(g), Claims: claims, Sentence: sayTaken(len(g), matching, claims)})
	}
	for _, g := range group(a.fates, func(f fate) (string, bool) {
		return "", f.matches() && len(f.counters) > 0 && len(f.holders) == 0
	}) {
		claims := claimsIn(g, func(f fate) []*resourceapi.ResourceClaim { return f.users })
		counters := union(g, func(f fate) []string { return f.counters })
		add(Reason{
			Code: CodeCounters, Devices: len(g), Claims: claims, Counters: counters,
			Sentence: sayCounters(len(g), matching, counters, claims),
		})
	}
	for _, g := range group(a.fates, func(f fate) (string, bool) { return f.capacity, f.matches() && f.capacity != "" }) {
		claims := claimsIn(g, func(f fate) []*resourceapi.ResourceClaim { return f.users })
		add(Reason{Code: CodeCapacity, Devices: len(g), Claims: claims, Sentence: sayCapacity(len(g), matching, g, claims)})
	}
	for _, taint := range union(a.fates, taintTexts) {
		n := 0
		for _, f := range a.fates {
			if slices.Contains(taintTexts(f), taint) {
				n++
			}
		}
		add(Reason{Code: CodeTaint, Devices: n, Taint: taint, Sentence: sayTaint(n, matching, taint)})
	}
	for _, g := range group(a.fates, func(f fate) (string, bool) { return f.gateOff, f.matches() && f.gateOff != "" }) {
		add(Reason{Code: CodeFeatureOff, Devices: len(g), Sentence: sayDeviceGate(len(g), matching, g[0].gateOff)})
	}
	if a.need > resourceapi.AllocationResultsMaxSize {
		add(Reason{Code: CodeTooMany, Sentence: sayTooMany(a.need)})
	} else if *a.request.fields().mode == resourceapi.DeviceAllocationModeAll {
		add(Reason{Code: CodeAll, Devices: matching, Sentence: sayAll(free, matching)})
	} else if a.need > 1 {
		add(Reason{Code: CodeCount, Devices: free, Sentence: sayCount(a.need, free, matching)})
	}
	return all
}

func taintTexts(f fate) []string {
	var all []string
	for _, t := range f.taints {
		all = append(all, fleet.TaintText(t))
	}
	return all
}

// group returns the fates that the function wants, by the key that it gives, in order of the keys.
func group(all []fate, by func(fate) (string, bool)) [][]fate {
	groups := map[string][]fate{}
	var keys []string
	for _, f := range all {
		k, wanted := by(f)
		if !wanted {
			continue
		}
		if groups[k] == nil {
			keys = append(keys, k)
		}
		groups[k] = append(groups[k], f)
	}
	slices.Sort(keys)
	var sorted [][]fate
	for _, k := range keys {
		sorted = append(sorted, groups[k])
	}
	return sorted
}

func claimsIn(all []fate, of func(fate) []*resourceapi.ResourceClaim) []string {
	return union(all, func(f fate) []string {
		var names []string
		for _, c := range of(f) {
			names = append(names, key(c))
		}
		return names
	})
}

func union(all []fate, of func(fate) []string) []string {
	var names []string
	for _, f := range all {
		names = append(names, of(f)...)
	}
	slices.Sort(names)
	return slices.Compact(names)
}
