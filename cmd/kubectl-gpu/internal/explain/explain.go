package explain

import (
	"context"
	"fmt"
	"runtime"
	"slices"

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
