"""What the page's words mean, as it prints them: (term, text). Nothing comes in."""

DEFINITIONS = (
    (
        "EER",
        "The equal error rate: the share of targets rejected where it equals the share of "
        "non-targets accepted. A trial is accepted when its score is at least the threshold; equal "
        "scores are one operating point; between the two operating points around the crossing the "
        "value is interpolated linearly.",
    ),
    (
        "Interval",
        "95 % percentile interval by bootstrap over speakers: speakers are drawn with replacement, "
        "a trial weighs the product of how often its two speakers were drawn; 1,000 replicates, "
        "200 above a million trials, fixed seed; replicates without targets or without "
        "non-targets are drawn again.",
    ),
    (
        "minDCF(p)",
        "The least detection cost over all thresholds with prior p of a target and costs of 1, "
        "divided by min(p, 1 - p): 1 is a system that says the same to every trial.",
    ),
    (
        "actDCF, Cllr",
        "The cost of decisions made by the calibrated log-likelihood ratios with a prior of 0.01, "
        "normalised like minDCF; and the cost of the ratios themselves over all priors, in bits "
        "(0 is perfect, 1 is worth nothing).",
    ),
    (
        "minCllr",
        "The Cllr that the best monotonic map from score to ratio would have on these very trials: "
        "what the scores tell apart. Cllr less minCllr is what calibration costs.",
    ),
    (
        "Calibration plot",
        "The error rate of decisions by the log-likelihood ratios (actual) and by the best "
        "threshold (minimum) at every prior, divided by that of the better of accepting all and "
        "accepting nothing: the normalised Bayes error rate of Brummer and de Villiers (The "
        "BOSARIS Toolkit, 2011). At the marked priors it is actDCF and minDCF. The area "
        "between the curves is lost by calibration; above 1 the ratios are worse than none.",
    ),
    (
        "At threshold",
        "The mean of the share of targets rejected and of non-targets accepted at the threshold "
        "that is stored with the model, learned from its validation speakers.",
    ),
    (
        "Untrained",
        "The same network with the weights that its training began with, drawn or those of --init, "
        "scored on the same trials.",
    ),
    (
        "Back end",
        "What makes a score of two embeddings, step by step. mean: the mean of the development "
        "embeddings is subtracted; lda, whiten, length: linear discriminant analysis, whitening, "
        "scaling to unit length; cosine, plda: the scorer, plda being two-covariance probabilistic "
        "linear discriminant analysis; qmf: durations, lengths of embeddings and cohort means are "
        "added by logistic regression. A verdict is about the last one, whatever the numbers: "
        "nothing is chosen on a test list.",
    ),
    (
        "snorm, asnorm",
        "Score normalisation: the score less the mean and divided by the deviation of the scores "
        "of either side with a cohort of other speakers, averaged over the two sides; asnorm "
        "(adaptive) takes from the cohort the highest scores of each side alone.",
    ),
    (
        "Conditions",
        "The same measures over parts of the list, by a property of speakers or recordings: trials "
        "whose two sides share a value, or pair two values (a / b). A part without trials of one "
        "kind has no figure.",
    ),
    (
        "Difference, p",
        "Paired comparison of two back ends on the same trials: in each bootstrap replicate both "
        "are measured with the same speakers, and the difference of their EERs is taken. p is "
        "twice the share of replicates on the other side of zero, each side with one replicate "
        "more, and at most 1.",
    ),
    (
        "Hardest trials",
        "The target trials with the lowest scores and the non-target trials with the highest. A "
        "wrong label shows here first: listen before the model is blamed. A player holds the "
        "loudest ten seconds of the first minute; an enrolment of several utterances is heard in "
        "its first.",
    ),
    (
        "Training",
        "The loss rises while the margin of the head grows, and accuracy falls: that is wished "
        "for. What tells is the EER of held-out training speakers.",
    ),
)
