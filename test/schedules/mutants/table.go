package main

const (
	checkpointDir = "pkg/checkpoint"
	durableDir    = "pkg/durable"
	lockDir       = "pkg/lock"
	prepareDir    = "pkg/prepare"
	ledgerDir     = "pkg/prepare/ledger"
	reconcileDir  = "pkg/prepare/reconcile"
	stepsDir      = "pkg/prepare/steps"
	publishDir    = "pkg/publish"
	vfioDir       = "pkg/vfio"
)

// mutants are the defects that the schedules must find, each one on its own. If you rename or move
// a function or field that a line names, change the name in that line.
var mutants = []mutant{
	{"a file is written in place", durableDir, "Replace", instead{"tmpPrefix", `""`}},
	{"a new file name is not synced to the disk", durableDir, "Replace", skip{call{to: "SyncDir"}}},
	{"a removed file name is not synced to the disk", durableDir, "Remove", skip{call{to: "SyncDir"}}},
	{"what a killed process wrote is taken for synced", checkpointDir, "(*Store).SyncDirs", emptyRange{}},
	{"claims are not locked", prepareDir, "(*Preparer).LockClaim", lastArgument{call{to: "Acquire"}, ""}},
	{"GPUs are not locked", prepareDir, "LockGPUs", lastArgument{call{to: "Add"}, ""}},
	{"locks are shared", lockDir, "(*waiter).tryLock", instead{"F_WRLCK", "F_RDLCK"}},
	{"conflicts with other claims are not checked", prepareDir, "(*Preparer).prepare", skip{call{to: "checkConflicts"}}},
	{"the shares of other claims are not counted", prepareDir, "(*Preparer).checkShare", lastArgument{call{to: "checkCapacity"}, "$[:0]"}},
	{"the plan is not recorded before the steps", prepareDir, "(*Preparer).execute", skip{call{to: "Journal"}}},
	{"the result is not recorded", prepareDir, "(*Preparer).execute", skip{call{to: "recordResult"}}},
	{"the claim's CDI spec is not written", prepareDir, "(*Preparer).writeSpec", skip{call{to: "Apply"}}},
	{"numbers of an earlier driver load are written", prepareDir, "(*Preparer).writeSpec", skip{call{to: "checkBinding"}}},
	{"CDI specs outlive the driver load", prepareDir, "(*Preparer).WithdrawSpecs", skip{call{to: "RemoveClaim"}}},
	{"an unfinished preparation is taken for a finished one", prepareDir, "(*Preparer).reprepare", dropOperand{"Prepared"}},
	{"another allocation is taken for the same", prepareDir, "(*Preparer).reprepare", compareLengths{"sameDevice"}},
	{"the record is removed though a step was not reverted", prepareDir, "(*Preparer).undo", ignore{call{to: "RevertAll"}}},
	{"the claim's metadata is not written", stepsDir, "(*ClaimSpec).Apply", skip{call{to: "WriteMetadata"}}},
	{"the CDI spec of an unprepared claim stays", stepsDir, "(*ClaimSpec).Revert", doNothing{}},
	{"an instance whose creation was interrupted is not searched for", stepsDir, "(*MIGInstance).Revert", dropOperand{"Asked"}},
	{"the instances before a creation are not recorded", stepsDir, "(*MIGInstance).Apply", skip{call{"Journal", "recordBefore"}}},
	{"a new instance's ID is not recorded at once", stepsDir, "(*MIGInstance).Apply", skip{call{"Journal", "CreateInstance"}}},
	{"instances are identified by their IDs alone", stepsDir, "SameInstance", keepOperand{"ID"}},
	{"a lost partition is not noticed", prepareDir, "(*Preparer).restorePartitions", condition{"findIntact", true}},
	{"a GPU's MIG mode is enabled without a mark", stepsDir, "(*MIGInstance).enableMIGMode", skip{call{to: "Mark"}}},
	{"a GPU's settings are not restored", stepsDir, "(*Setting).Revert", doNothing{}},
	{"a GPU's settings are reset to the default", stepsDir, "(*Setting).Revert", lastArgument{call{to: "write"}, "*new(T)"}},
	{"a daemon is not stopped", stepsDir, "(*MPSDaemon).Revert", doNothing{}},
	{"what claims share is not recorded", stepsDir, "(*Shared).applyOrMaintain", skip{call{to: "save"}}},
	{"the first claim that leaves reverts what others hold", stepsDir, "(*Shared).Revert", condition{"others", false}},
	{"a claim changes what others hold", stepsDir, "(*Shared).agree", condition{"others", false}},
	{"a claim of an earlier boot shares something", stepsDir, "ReadSharers", dropOperand{"BootID"}},
	{"unreadable records share nothing", stepsDir, "ReadSharers", condition{"err", false}},
	{"what no claim shares any more stays", reconcileDir, "(*Reconciler).collectUnreferenced", skip{call{to: "EndUnshared"}}},
	{"the file of shared state that no claim has stays", stepsDir, "(*Shared).End", skip{call{to: "RemoveHolder"}}},
	{"a holder from before a reboot counts", stepsDir, "(*Shared).load", dropOperand{"BootID"}},
	{"a record of an earlier boot is taken for the hardware's state", stepsDir, "NewEnv", literalField{"EarlierBoot", "false"}},
	{"a late call is not refused", prepareDir, "(*Preparer).prepare", skip{call{to: "checkUnchanged"}}},
	{"a claim that no Pod may use any more is prepared", prepareDir, "(*Preparer).checkUnchanged", skip{call{to: "checkReserved"}}},
	{"a claim that is in use again is garbage collected", reconcileDir, "(*Reconciler).UnprepareOrphan", ignore{call{to: "confirm"}}},
	{"a claim that lost its devices is not garbage collected", ledgerDir, "(*Ledger).OrphanReason", emptyRange{}},
	{"a claim is taken for a deleted one of the same name", ledgerDir, "(*Ledger).OrphanReason", condition{"ClaimUID", false}},
	{"unfinished files of holders stay", reconcileDir, "(*Reconciler).removeAbandoned", skip{call{to: "RemoveHolder"}}},
	{"unfinished files of records stay", checkpointDir, "(*Store).DiscardUnfinished", condition{"unfinishedOf", false}},
	{"the plugin's MIG mode is taken for an admin's", stepsDir, "(*MIGInstance).enableMIGMode", lastArgument{call{to: "Mark"}, `$ + "?"`}},
	{"a GPU's drivers are not recorded before they change", stepsDir, "(*Passthrough).bind", skip{call{to: "Journal"}}},
	{"a GPU stays bound to VFIO", stepsDir, "(*Passthrough).Revert", doNothing{}},
	{"a GPU's original driver override is not restored", vfioDir, "Binding.release", lastArgument{call{to: "SetOverride"}, `""`}},
	{"what claims hold is not kept published", publishDir, "(*retainer).markRetained", unset{"Held"}},
	{"claims that are not prepared hold nothing", publishDir, "(*retainer).Retain", lastArgument{call{"markRetained", "readAllocations"}, ""}},
}
